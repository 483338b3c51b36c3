"""Parts of a curriculum: the tasks of one taskset, or all tasks, with their selector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import polars as pl

from ....store import Store, Task
from ....store.errors import ConfigError
from ....store.query import literal
from ...config import SelectorConfig, TasksConfig
from .bots import Bots
from .by_pass_rate import ByPassRate
from .outcomes import PassRule
from .selectors import (
    Chosen,
    Outcomes,
    PassRatePosterior,
    Selector,
    UniformRandom,
    ordered,
    sequential,
    shuffle,
)
from .task_features import facts, numbers


class Learner(Selector, Protocol):
    """A selector that learns from the outcomes of rollouts."""

    beliefs: PassRatePosterior

    def learn(self, seen: Outcomes) -> None:
        """Count the outcomes of a batch."""
        ...


@dataclass
class TasksetSelector:
    """Tasks with one selector."""

    name: str
    share: float
    tasks: Sequence[Task]
    selector: Selector
    described: str
    history: str | None
    seed: int
    mark: tuple[int, ...]
    """Part of the seed, so that the parts of a curriculum are independent."""
    pass_metric: str | None
    pass_threshold: float

    @property
    def learner(self) -> Learner | None:
        """The selector, if it learns."""
        return self.selector if isinstance(self.selector, ByPassRate | Bots) else None

    @property
    def rule(self) -> PassRule:
        """When a rollout of these tasks passed."""
        return PassRule(self.places.keys(), self.pass_metric, self.pass_threshold)

    @cached_property
    def places(self) -> dict[str, int]:
        """The index of each task, by its ID."""
        return {task.task_id: place for place, task in enumerate(self.tasks)}

    def choose(self, n: int, first: int, batch: int) -> Chosen:
        """Choose n tasks for a batch."""
        # by batch, not from one stream: a resumed run must choose the same tasks
        rng = np.random.default_rng([self.seed, batch, *self.mark])
        return self.selector.choose(n, first=first, rng=rng)

    def seen(self, found: pl.DataFrame) -> Outcomes:
        """Return the outcomes of this part's tasks."""
        mine = found.filter(pl.col("task_id").is_in(list(self.places)))
        places = np.array([self.places[task_id] for task_id in mine["task_id"]], np.int64)
        return Outcomes(places, mine["passes"].to_numpy(), mine["rollouts"].to_numpy())

    def check(self, most: int) -> None:
        """Raise ConfigError if a batch needs more tasks than the selector can take once."""
        repeats = not isinstance(self.selector, UniformRandom | ByPassRate | Bots)
        if repeats or (isinstance(self.selector, UniformRandom) and self.selector.replacement):
            return
        if most > len(self.tasks):
            of = f" of taskset `{self.name}`" if self.name else ""
            raise ConfigError(
                f"a batch needs {most} tasks{of}, and `{self.described}` takes each of "
                f"{len(self.tasks)} once at most; choose `tasks.selector: shuffle`, or lower "
                "`explorer.tasks_per_batch` or `trainer.batch_size`"
            )


@dataclass(frozen=True)
class _Sizes:
    tasks: int
    batch: float
    """Mean number of these tasks in a batch."""
    group: int
    """Rollouts of each task."""

    @property
    def epoch(self) -> float:
        """Number of batches in one pass over all of them."""
        return self.tasks / self.batch


def parts(
    past: Store,
    config: TasksConfig,
    tasks: Sequence[Task],
    *,
    seed: int,
    batch_size: int,
    group_size: Callable[[str], int],
) -> list[TasksetSelector]:
    """Return the parts of a curriculum, in the order of their names.

    `group_size` is the number of rollouts of each task of a taskset.
    """
    if config.mixture is None:
        sizes = _Sizes(len(tasks), batch_size, group_size(""))
        made = _selector(past, config.where, config.selector, sizes, (seed,))
        return [TasksetSelector("", 1.0, tasks, *made, seed, (), *config.passes(""))]
    total, found = sum(chosen.weight for chosen in config.mixture.values()), []
    for i, name in enumerate(sorted(config.mixture)):
        chosen, own = config.mixture[name], [task for task in tasks if task.taskset == name]
        where = f"({config.where}\n) AND taskset = {literal(name)}"
        how = chosen.selector or config.selector
        sizes = _Sizes(len(own), chosen.weight / total * batch_size, group_size(name))
        made = _selector(past, where, how, sizes, (seed, i + 1))
        passes = config.passes(name)
        found.append(TasksetSelector(name, chosen.weight, own, *made, seed, (i + 1,), *passes))
    return found


def _selector(
    past: Store, where: str, config: SelectorConfig, sizes: _Sizes, seed: tuple[int, ...]
) -> tuple[Selector, str, str | None]:
    """Return a selector, how it is described, and the history that it starts from."""
    [(name, chosen)] = [(n, getattr(config, n)) for n in config.known() if getattr(config, n)]
    params = ", ".join(f"{k}={v!r}" for k, v in chosen.model_dump().items() if v is not None)
    described = f"{name}({params})"
    history = getattr(chosen, "history", None)
    key = f"tasks.selector.{name}"
    if config.by_pass_rate is not None:
        weight, own = config.by_pass_rate.weight, ("pass_rate", "num_rollouts")
        known = facts(past, where, weight, own=own, key=f"{key}.weight")
        return ByPassRate(config.by_pass_rate, known, epoch=sizes.epoch), described, history
    if config.bots is not None:
        anchors = {
            which: numbers(past, where, sql, key=f"{key}.{which}")
            for which, sql in (("weak", config.bots.weak), ("strong", config.bots.strong))
            if sql is not None
        }
        _check_anchors(anchors, key)
        size, rollouts = sizes.tasks, sizes.group
        made = Bots(config.bots, size=size, rollouts=rollouts, epoch=sizes.epoch, **anchors)
        return made, described, history
    if config.random is not None:
        return UniformRandom(sizes.tasks, replacement=config.random.replacement), described, None
    by = config.easy_to_hard or config.hard_to_easy
    if by is not None:
        values = numbers(past, where, by.by, key=f"{key}.by")
        return ordered(values, falling=config.hard_to_easy is not None), described, None
    walk = sequential(sizes.tasks) if config.sequential else shuffle(sizes.tasks, seed)
    return walk, described, None


def _check_anchors(anchors: dict[str, np.ndarray], key: str) -> None:
    for which, values in anchors.items():
        outside = values[(values < 0) | (values > 1)]
        if len(outside):
            raise ConfigError(
                f"`{key}.{which}` must be a pass rate from 0 to 1, got {outside[0]:g}"
            )
