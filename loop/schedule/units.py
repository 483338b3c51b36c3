"""The units, tasks or rollouts, that training steps use: how many, and in which order."""

from collections.abc import Callable
from math import ceil

from ...store.replay import Order, most, split
from ..config import RunConfig, SourceConfig
from ..losses import Algorithm


def order(config: RunConfig, algorithm: Algorithm) -> Order:
    """Return the order in which a run uses its explorer's rows.

    By arrival if it streams; else in the order of batches, whichever group was faster.
    """
    if config.schedule.streaming:
        return Order(by_arrival=True)
    return Order(groups_per_batch=batch_tasks(config, algorithm))


def batch_tasks(config: RunConfig, algorithm: Algorithm) -> int:
    """Return the number of tasks in a batch of the explorer: enough for its part of a step.

    If tasksets have groups of different sizes and rows are drawn, enough on average.
    """
    explorer = config.explorer
    assert explorer is not None, "a run that explores has an explorer"
    mixture = config.tasks.mixture
    shares = {"": 1.0} if mixture is None else {name: one.weight for name, one in mixture.items()}
    units = sum(share * units_of(config, algorithm, name) for name, share in shares.items())
    per_group = units / sum(shares.values())
    # 1e-9: a mean that is rounded down must not ask for one task more
    needed = explorer.tasks_per_batch or ceil(_most_own_units(config) / per_group - 1e-9)
    # A stream needs no surplus: it starts groups until the steps have their rows.
    over = explorer.oversampling
    return ceil(needed * (1 + over.ratio)) if over and not config.schedule.streaming else needed


def units_of(config: RunConfig, algorithm: Algorithm, taskset: str) -> int:
    """Return how many units a group of a taskset is: one, or as many as it has rollouts."""
    own = config.explorer_for(taskset).group_size
    return 1 if algorithm.grouped else own or algorithm.group_size


def new_units(config: RunConfig) -> Callable[[int], int]:
    """Return how many of the explorer's units each training step is the first to use.

    Units drawn once are the batch, or its part from the run itself. If units are drawn several
    times, the first step adds a batch, and each later one `schedule.new_units_per_step`. This, and
    not the explorer's progress, decides from which rows a step draws.
    """
    trainer = config.trainer
    name, own = own_source(config)
    size, epochs = _most_own_units(config), trainer.max_uses
    if own is not None:
        epochs = own.max_uses or 1
    if config.is_replay:
        later = config.schedule.new_units_per_step or ceil(size / epochs)
        return lambda step: size if step == 1 else later
    if name is None:
        return lambda _: size
    shares = _shares(config)
    return lambda step: split(shares, trainer.batch_size, step)[name]


def _most_own_units(config: RunConfig) -> int:
    """Return the most units of a step that come from the explorer."""
    name, _ = own_source(config)
    size = config.trainer.batch_size
    return size if name is None else most(_shares(config), size)[name]


def _shares(config: RunConfig) -> dict[str, float]:
    return {name: source.share for name, source in (config.trainer.sampler.mixed or {}).items()}


def own_source(config: RunConfig) -> tuple[str, SourceConfig] | tuple[None, None]:
    """Return the source of a mixture that the run's explorer fills, if there is one."""
    mixed = config.trainer.sampler.mixed or {}
    return next(((n, s) for n, s in mixed.items() if not s.is_stored), (None, None))


def own_where(config: RunConfig) -> str | None:
    """Return the SQL condition on the explorer's rows."""
    _, own = own_source(config)
    return config.trainer.and_where(own.where if own is not None else None)


class UnitSchedule:
    """How many of the run's own units each step may draw from; None: all."""

    def __init__(self, config: RunConfig) -> None:
        self._new_units = new_units(config)
        self._is_needed = config.is_replay
        self._known = [0]

    def of(self, step: int) -> int | None:
        """Return the number of units that the steps up to this one use."""
        if not self._is_needed:
            return None
        while len(self._known) <= step:
            self._known.append(self._known[-1] + self._new_units(len(self._known)))
        return self._known[step]
