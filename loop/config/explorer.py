"""Who tries, and how far explorer and trainer may be apart."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ...store.errors import nearest
from .base import Float, Int, OperatorSpec, Section, WeightOrParameters
from .engines import EngineConfig, OtherModel, TransformersEngine


class SamplingConfig(Section):
    """How tokens are sampled.

    Stored log-probs are of the full distribution at `temperature`, which is what a trainer
    computes. With `top_p`, `top_k` or `min_p` the tokens are drawn from what is left of it after
    truncation: a policy gradient estimated from them is biased, since the tokens left out are never
    tried and the ratios do not correct for that. DeepSeek-V3.2 (arXiv:2512.02556, section 3.1)
    applies the sampler's mask in training too; rlake does not. Train without truncation where the
    estimate should be unbiased.
    """

    temperature: Float = Field(default=1.0, ge=0)
    top_p: Float = Field(default=1.0, gt=0, le=1)
    """The likeliest tokens with this much probability together are sampled from."""
    top_k: Int = Field(default=0, ge=0)
    """So many of the likeliest tokens are sampled from; 0: all."""
    min_p: Float = Field(default=0.0, ge=0, le=1)
    """Tokens that are at least this likely, relative to the likeliest, are sampled from."""
    max_tokens: Int = Field(default=64, ge=1)
    """Of one answer; a conversation of several turns has so many each."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""


class OverSampleConfig(Section):
    """More groups are tried than a batch needs, and the slowest are stopped."""

    ratio: Float = Field(gt=0, le=4)
    """How many more, as a share of the batch."""
    wait_seconds: Float = Field(default=0.0, ge=0)
    """How long the slowest may still take when enough are finished."""


class DynamicTimeout(Section):
    """A try may take so many times what tries took in the mean."""

    ratio: Float = Field(default=3.0, ge=1)
    after: Int = Field(default=20, ge=1)
    """Tries that end by themselves before it holds; until then `try_seconds` does."""


class ExplorerConfig(Section):
    """The producer of experience."""

    workflow: str | dict[str, dict[str, Any] | None] = "single_turn"
    """Name of a workflow of ours, or `package.module:function`; `{name: {parameter: value}}`."""
    engine: EngineConfig = EngineConfig(transformers=TransformersEngine())
    """What samples."""
    models: dict[str, OtherModel] = Field(default={})
    """Other models that the workflow asks, by the name of the parameter that takes each."""
    rewards: str | dict[str, WeightOrParameters] = "exact_match"
    """A reward function, or several with their weights, or with their parameters.

    `{math_equivalence: 1.0, overlong: {max_tokens: 512, cache: 128, weight: 0.5}}`
    """
    group_size: Int | None = Field(default=None, ge=1)
    """Tries at each task; None takes the algorithm's."""
    tasks_per_batch: Int | None = Field(default=None, ge=1)
    """None: as many as one training step needs."""
    tasks_per_commit: Int | None = Field(default=None, ge=1)
    """Tasks that are sampled and stored together; None: the whole batch."""
    sampling: SamplingConfig = SamplingConfig()
    operators: tuple[OperatorSpec, ...] = ()
    """A pipeline's chain, applied to each group's rows before they are stored; all rows stay.

    What a filter drops has it as its `drop_reason`, and is not trained on.
    """
    try_seconds: Float = Field(default=600.0, gt=0)
    """Longest time of one try; then it becomes a row that says so."""
    retries: Int = Field(default=0, ge=0)
    """How often a try that raised, or took too long, is made again."""
    dynamic_timeout: DynamicTimeout | None = None
    """A limit that follows how long tries take; None: only `try_seconds`."""
    over_sample: OverSampleConfig | None = None
    """More groups than a batch needs, of which the slowest are stopped; for the batches of a
    schedule that does not stream."""
    tries_at_once: Int | None = Field(default=None, ge=1)
    """Most tries under way at once, for environments that are few; None: all of a batch."""
    max_failed_batches: Int = Field(default=3, ge=1)
    """So many batches in a row without one usable row end the job."""


PRESETS: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "one_step_off": {"max_ahead": 1},
    "asynchronous": {"max_ahead": 3, "max_lag": 8, "stream": True},
}
"""Schedules by name: `schedule: asynchronous`."""


class ScheduleConfig(Section):
    """How far explorer and trainer may be apart, in optimizer steps.

    A name stands for one of PRESETS; `{preset: asynchronous, max_lag: 4}` changes a part of it.
    """

    preset: str | None = None
    """on_policy, one_step_off or asynchronous: what the other keys are by default."""
    stream: bool = False
    """Whether groups are drawn as they finish, and weights replaced while answers are sampled.

    Else each batch is sampled with the weights due to it and drawn in its order, so that a run is
    the same however fast anybody was.
    """
    max_ahead: Int = Field(default=0, ge=0)
    """Train batches that the explorer may be ahead; 0 is on-policy."""
    max_lag: Int | None = Field(default=None, ge=0)
    """Oldest rows that the trainer takes; None: as old as max_ahead and publish_every make them."""
    publish_every: Int = Field(default=1, ge=1)
    """Optimizer steps between two publications of weights."""
    weights: Literal["store", "memory", "broadcast"] = "store"
    """How they get to explorers: as folders; within the process of `rlake run`, without files; or
    sent by torch.distributed. Not in the store, folders are written of those at checkpoints only.
    """
    new_per_step: Int | None = Field(default=None, ge=1)
    """Units (groups or rows) that the explorer makes for each training step of a replay.

    None: batch_size divided by epochs, so that each can be drawn as often as it may.
    """
    wait_seconds: Float = Field(default=600, gt=0)
    """Longest wait of one job for the other, which may have to start an engine first."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        given = {"preset": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or given.get("preset") is None:
            return given
        name = given["preset"]
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"there is no schedule `{name}`{nearest(str(name), PRESETS)}")
        return {**PRESETS[name], **given}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        oldest = self.max_ahead + self.publish_every - 1
        if self.publish_every > self.max_ahead + 1:
            raise ValueError(
                f"publish_every {self.publish_every} is more than max_ahead + 1: the explorer "
                "would wait for weights that are never published"
            )
        if self.max_lag is not None and self.max_lag < oldest:
            raise ValueError(
                f"max_lag {self.max_lag} is less than max_ahead + publish_every - 1 = {oldest}: "
                "rows would be stale before they could be drawn"
            )
        return self

    @property
    def lag(self) -> int:
        """The oldest rows that the trainer takes."""
        return self.max_ahead + self.publish_every - 1 if self.max_lag is None else self.max_lag
