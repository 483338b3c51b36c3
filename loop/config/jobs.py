"""Who tries, how far explorer and trainer may be apart, and how it is measured."""

from typing import Self

from pydantic import Field, model_validator

from .section import Float, Int, OperatorSpec, Section, WeightOrParameters


class SamplingConfig(Section):
    """How tokens are sampled."""

    temperature: Float = Field(default=1.0, ge=0)
    max_tokens: Int = Field(default=64, ge=1)


class ExplorerConfig(Section):
    """The producer of experience."""

    workflow: str = "single_turn"
    """Name of a workflow of ours, or `package.module:function`."""
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
    max_failed_batches: Int = Field(default=3, ge=1)
    """So many batches in a row without one usable row end the job."""


class ScheduleConfig(Section):
    """How far explorer and trainer may be apart, in optimizer steps."""

    max_ahead: Int = Field(default=0, ge=0)
    """Train batches that the explorer may be ahead; 0 is on-policy."""
    max_lag: Int | None = Field(default=None, ge=0)
    """Oldest rows that the trainer takes; None: as old as max_ahead and publish_every make them."""
    publish_every: Int = Field(default=1, ge=1)
    """Optimizer steps between two publications of weights."""
    new_per_step: Int | None = Field(default=None, ge=1)
    """Units (groups or rows) that the explorer makes for each training step of a replay.

    None: batch_size divided by epochs, so that each can be drawn as often as it may.
    """
    wait_seconds: Float = Field(default=600, gt=0)
    """Longest wait of one job for the other."""

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


class EvaluateConfig(Section):
    """How a policy is measured."""

    where: str = "split = 'eval'"
    """SQL condition over the table `tasks`."""
    group_size: Int = Field(default=1, ge=1)
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    batch_tasks: Int = Field(default=256, ge=1)
    """Tasks sampled together."""
