"""How a policy is measured: on which tasks, how often each is tried, and when."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field

from .base import Int, Section
from .engines import EngineConfig, SamplingConfig

Ks = tuple[Annotated[Int, Field(ge=1)], ...]


class TasksetMeasure(Section):
    """What is different for one taskset; None: as for the others."""

    group_size: Int | None = Field(default=None, ge=1)
    """Tries at each task."""
    pass_at: Ks | None = None
    """For which k pass@k and best@k are told."""
    sampling: SamplingConfig | None = None


class EvaluateConfig(Section):
    """How a policy is measured."""

    where: str = "split = 'eval'"
    """SQL condition over the table `tasks`."""
    tasksets: dict[str, TasksetMeasure] | None = None
    """Of these tasks only those of some tasksets, each measured by itself too.

    `{gsm8k: {}, aime: {group_size: 32, sampling: {temperature: 1.0}}}`; None: all together.
    """
    every_steps: Int | None = Field(default=None, ge=1)
    """Optimizer steps between two measurements while the run goes on; the last weights are measured
    too. None: it is not measured but by `rlake evaluate`.

    The explorer measures before it goes on; a trainer that waits for rows waits
    `schedule.timeout` at most.
    """
    at_start: bool = True
    """Whether, with `every`, the weights that the run begins with are measured as well."""
    group_size: Int = Field(default=1, ge=1)
    """Tries at each task."""
    pass_at: Ks = ()
    """For which k pass@k and best@k are told; none: 1, and the group's size."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    engine: EngineConfig | None = None
    """What samples for `rlake evaluate`; None: as for the explorer, whose own engine measures while
    the run goes on."""
    batch_size: Int = Field(default=256, ge=1)
    """Tasks sampled together."""

    @property
    def ks(self) -> tuple[int, ...]:
        """For which k pass@k and best@k are told."""
        return self.pass_at or tuple(sorted({1, self.group_size}))

    def of(self, taskset: str) -> Self:
        """Return the settings as they hold for the tasks of a taskset."""
        own = (self.tasksets or {}).get(taskset)
        return self if own is None else self.model_copy(update=dict(_given(own)))

    @property
    def metrics(self) -> list[str]:
        """The names of all that is measured."""
        names = ["accuracy", "reward_mean"]
        parts = {f"{name}/": self.of(name) for name in self.tasksets or {}}
        for prefix, settings in (parts or {"": self}).items():
            ks = [f"{what}@{k}" for k in settings.ks for what in ("pass", "best")]
            names += [prefix + name for name in ([*names[:2], *ks] if prefix else ks)]
        return [f"eval/{name}" for name in names]

    def is_due(self, version: int, *, last: int | None) -> bool:
        """Tell whether a version of a run of `last` steps is measured while the run goes on."""
        if self.every_steps is None:
            return False
        if version == 0:
            return self.at_start
        return version % self.every_steps == 0 or version == last


def _given(own: TasksetMeasure) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in own if value is not None)
