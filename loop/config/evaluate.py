"""The section `evaluate`: on which tasks policies are evaluated, how and when."""

from typing import Annotated, Self

from pydantic import Field

from .base import Int, NamedRewards, NamedWorkflow, Section
from .engines import EngineConfig, SamplingConfig

Ks = tuple[Annotated[Int, Field(ge=1)], ...]


class TasksetEvaluation(Section):
    """Settings that differ for one taskset; None: as for the others."""

    group_size: Int | None = Field(default=None, ge=1)
    """Rollouts of each task."""
    pass_at: Ks | None = None
    """The k of the reported pass@k and best@k."""
    sampling: SamplingConfig | None = None
    """Sampling parameters of these tasks; None: those of `evaluate`."""
    workflow: NamedWorkflow | None = None
    """Workflow of these tasks; None: that of training."""
    rewards: NamedRewards | None = None
    """Rewards of these tasks; None: those of training."""


class EvaluateConfig(Section):
    """How policies are evaluated."""

    where: str = "split = 'eval'"
    """SQL condition over the table `tasks`."""
    tasksets: dict[str, TasksetEvaluation] | None = None
    """Restrict the tasks to these tasksets, and report each one separately too.

    `{gsm8k: {}, aime: {group_size: 32, sampling: {temperature: 1.0}}}`; None: all tasks together.
    """
    every_steps: Int | None = Field(default=None, ge=1)
    """Optimizer steps between two evaluations during the run; None: no evaluation during the run.

    The last weights are evaluated too. The explorer evaluates before it continues, and a trainer
    waits for its rows for at most `schedule.timeout` seconds.
    """
    at_start: bool = True
    """With `every_steps`, whether the initial weights are evaluated as well."""
    group_size: Int = Field(default=1, ge=1)
    """Rollouts of each task."""
    pass_at: Ks = ()
    """The k of the reported pass@k and best@k; none: 1 and the group's size."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """Sampling parameters; by default greedy."""
    workflow: NamedWorkflow | None = None
    """Workflow of the evaluated tasks; None: that of training, for the tasks of each taskset."""
    rewards: NamedRewards | None = None
    """Rewards of the evaluated tasks; None: those of training, for the tasks of each taskset."""
    engine: EngineConfig | None = None
    """The inference engine of `rlake evaluate`; None: the explorer's.

    During a run the explorer's own engine evaluates.
    """
    batch_size: Int = Field(default=256, ge=1)
    """Tasks whose rollouts run concurrently and are stored together."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of the reported pass@k and best@k."""
        return self.pass_at or tuple(sorted({1, self.group_size}))

    def of(self, taskset: str) -> Self:
        """Return the settings that apply to the tasks of a taskset."""
        own = (self.tasksets or {}).get(taskset)
        if own is None:
            return self
        return self.model_copy(update={k: v for k, v in own if v is not None})

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics that an evaluation reports."""
        names = ["accuracy", "reward_mean"]
        parts = {f"{name}/": self.of(name) for name in self.tasksets or {}}
        for prefix, settings in (parts or {"": self}).items():
            ks = [f"{what}@{k}" for k in settings.ks for what in ("pass", "best")]
            names += [prefix + name for name in ([*names[:2], *ks] if prefix else ks)]
        return [f"eval/{name}" for name in names]

    def is_due(self, version: int, *, last: int | None) -> bool:
        """Return whether a version of a run of `last` steps is evaluated during the run."""
        if self.every_steps is None:
            return False
        if version == 0:
            return self.at_start
        return version % self.every_steps == 0 or version == last
