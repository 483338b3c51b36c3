"""Who tries, and how far explorer and trainer may be apart."""

from typing import Any

from pydantic import Field

from .base import Float, Int, OperatorSpec, Section, WeightOrParameters
from .engines import EngineConfig, OtherModel, SamplingConfig, TransformersEngine


class OversamplingConfig(Section):
    """More groups are tried than a batch needs, and the slowest are stopped."""

    ratio: Float = Field(gt=0, le=4)
    """How many more, as a share of the batch."""
    grace_period: Float = Field(default=0.0, ge=0)
    """How long the slowest may still take when enough are finished."""


class AdaptiveTimeout(Section):
    """A try may take so many times what tries took in the mean."""

    multiplier: Float = Field(default=3.0, ge=1)
    min_samples: Int = Field(default=20, ge=1)
    """Tries that end by themselves before it holds; until then `rollout_timeout` does."""


class ExplorerConfig(Section):
    """The producer of experience."""

    workflow: str | dict[str, dict[str, Any] | None] = "single_turn"
    """Name of a workflow of ours, or `package.module:function`; `{name: {parameter: value}}`."""
    engine: EngineConfig = EngineConfig(transformers=TransformersEngine())
    """What samples."""
    auxiliary_models: dict[str, OtherModel] = Field(default={})
    """Other models that the workflow asks, by the name of the parameter that takes each."""
    rewards: str | dict[str, WeightOrParameters] = "exact_match"
    """A reward function, or several with their weights, or with their parameters.

    `{math_equivalence: 1.0, overlong: {max_tokens: 512, cache: 128, weight: 0.5}}`
    """
    group_size: Int | None = Field(default=None, ge=1)
    """Tries at each task; None takes the algorithm's."""
    tasks_per_batch: Int | None = Field(default=None, ge=1)
    """None: as many as one training step needs."""
    tasks_per_chunk: Int | None = Field(default=None, ge=1)
    """Tasks that are sampled and stored together; None: the whole batch."""
    sampling: SamplingConfig = SamplingConfig()
    operators: tuple[OperatorSpec, ...] = ()
    """A pipeline's chain, applied to each group's rows before they are stored; all rows stay.

    What a filter drops has it as its `drop_reason`, and is not trained on.
    """
    rollout_timeout: Float = Field(default=600.0, gt=0)
    """Longest time of one try; then it becomes a row that says so."""
    max_retries: Int = Field(default=0, ge=0)
    """How often a try that raised, or took too long, is made again."""
    adaptive_timeout: AdaptiveTimeout | None = None
    """A limit that follows how long tries take; None: only `rollout_timeout`."""
    oversampling: OversamplingConfig | None = None
    """More groups than a batch needs, of which the slowest are stopped; for the batches of a
    schedule that does not stream."""
    max_concurrent_rollouts: Int | None = Field(default=None, ge=1)
    """Most tries under way at once, for environments that are few; None: all of a batch."""
    max_failed_batches: Int = Field(default=3, ge=1)
    """So many batches in a row without one usable row end the job."""
