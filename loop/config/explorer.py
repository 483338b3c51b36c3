"""The explorer: workflow, rewards, timeouts, retries and concurrency of rollouts."""

from typing import Self

from pydantic import Field, model_validator

from .base import Float, Int, NamedRewards, NamedWorkflow, OperatorSpec, Section
from .engines import EngineConfig, OtherModel, SamplingConfig, TransformersEngine


class OversamplingConfig(Section):
    """Run more groups than a batch needs, and cancel the slowest."""

    ratio: Float = Field(gt=0, le=4)
    """Additional groups, as a share of the batch."""
    grace_period: Float = Field(default=0.0, ge=0)
    """Seconds that the slowest groups may still take once enough are finished."""


class AdaptiveTimeout(Section):
    """Cancel a rollout that takes longer than this many times the mean rollout time."""

    multiplier: Float = Field(default=3.0, ge=1)
    """A rollout is canceled after this multiple of the mean rollout time."""
    min_samples: Int = Field(default=20, ge=1)
    """Completed rollouts before it applies; until then only `rollout_timeout` applies."""


class ExplorerConfig(Section):
    """The explorer, which generates experiences."""

    workflow: NamedWorkflow = "single_turn"
    """Name of a workflow, `package.module:function`, or `{name: {parameter: value}}`."""
    engine: EngineConfig = EngineConfig(transformers=TransformersEngine())
    """The inference engine that samples rollouts."""
    auxiliary_models: dict[str, OtherModel] = Field(default={})
    """Other models that the workflow calls, by the name of its parameter."""
    rewards: NamedRewards = "exact_match"
    """A reward function, or several with their weights, or with their parameters.

    `{math_equivalence: 1.0, overlong: {max_tokens: 512, cache: 128, weight: 0.5}}`. Each counts as
    `weight` (1) times what it returns plus `offset` (0): `{exact_match: {weight: 2, offset: -1}}`
    is 1 or -1.
    """
    group_size: Int | None = Field(default=None, ge=1)
    """Rollouts of each task; None: the algorithm's default."""
    tasks_per_batch: Int | None = Field(default=None, ge=1)
    """Tasks in a batch; None: as many as one training step needs."""
    tasks_per_chunk: Int | None = Field(default=None, ge=1)
    """Tasks that are sampled and stored together; None: the whole batch."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of rollouts."""
    system_prompt: str | None = None
    """System message of tasks that have none, in rows too; None: `model.system_prompt`, if any."""
    operators: tuple[OperatorSpec, ...] = ()
    """Operators applied to each group's rows before they are stored; all rows are stored.

    A row that a filter drops has its reason as `drop_reason`, and is not trained on.
    """
    rollout_timeout: Float = Field(default=600.0, gt=0)
    """Timeout of one rollout, in seconds; its row then has the finish reason `timeout`."""
    max_retries: Int = Field(default=0, ge=0)
    """Retries of a rollout that raised an error or timed out."""
    adaptive_timeout: AdaptiveTimeout | None = None
    """A timeout relative to the mean rollout time; None: only `rollout_timeout`."""
    oversampling: OversamplingConfig | None = None
    """Additional groups, of which the slowest are canceled; for schedules without `streaming`."""
    max_concurrent_rollouts: Int | None = Field(default=None, ge=1)
    """Most rollouts that run concurrently, for scarce environments; None: all of a batch."""
    max_failed_batches: Int = Field(default=3, ge=1)
    """The job ends after this many consecutive batches without a usable row."""

    @model_validator(mode="after")
    def _has_own_servers(self) -> Self:
        """Refuse a server of two models: each would be answered with the other's weights."""
        engines = {"engine": self.engine} | {
            f"auxiliary_models.{name}.engine": one.engine
            for name, one in self.auxiliary_models.items()
        }
        taken: dict[str, str] = {}
        for key, engine in engines.items():
            for url in () if engine.sglang is None else engine.sglang.urls:
                if (other := taken.setdefault(url.rstrip("/").lower(), key)) != key:
                    raise ValueError(
                        f"`{url}` is a server of `{other}` and of `{key}`, and has weights of one "
                        "model; start another server, and name it in one of them"
                    )
        return self
