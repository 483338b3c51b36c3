"""Which tasks or rollouts a training step takes up, and in what order."""

from collections.abc import Callable
from math import ceil

from ...store.replay import Order, most, split
from ..config import RunConfig, SourceConfig
from ..losses import Algorithm


def order(config: RunConfig, algorithm: Algorithm) -> Order:
    """Return in which order a run's own rows are taken up while its explorer makes them.

    By arrival when it streams; else in the order of its batches, whoever was faster.
    """
    if config.schedule.streaming:
        return Order(by_arrival=True)
    return Order(groups_per_step=batch_tasks(config, algorithm))


def batch_tasks(config: RunConfig, algorithm: Algorithm) -> int:
    """Return how many tasks each of the explorer's batches has: enough for its part of a step."""
    explorer = config.explorer
    assert explorer is not None, "a run that explores has an explorer"
    per_group = 1 if algorithm.grouped else explorer.group_size or algorithm.group_size
    needed = explorer.tasks_per_batch or ceil(_most_own_units(config) / per_group)
    over = explorer.oversampling
    return ceil(needed * (1 + over.ratio)) if over and not config.schedule.streaming else needed


def new_units(config: RunConfig) -> Callable[[int], int]:
    """Return how many units of the explorer's each training step is the first to take up.

    Drawn once, they are the batch, or that part of it that comes from the run itself. Drawn several
    times, the first step takes up a batch, and each later one `schedule.new_units_per_step`. That,
    and not how far the explorer happens to be, decides what a step is drawn from.
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
    """Return how many units of a step are the explorer's, at most."""
    name, _ = own_source(config)
    size = config.trainer.batch_size
    return size if name is None else most(_shares(config), size)[name]


def _shares(config: RunConfig) -> dict[str, float]:
    return {name: source.share for name, source in (config.trainer.sampler.mixed or {}).items()}


def own_source(config: RunConfig) -> tuple[str, SourceConfig] | tuple[None, None]:
    """Return the source of a mixed draw that the run's explorer feeds, if there is one."""
    mixed = config.trainer.sampler.mixed or {}
    return next(((n, s) for n, s in mixed.items() if not s.is_stored), (None, None))


def own_where(config: RunConfig) -> str | None:
    """Return the SQL condition on those of the explorer's rows that may be trained on."""
    _, own = own_source(config)
    return config.trainer.and_where(own.where if own is not None else None)


class UnitSchedule:
    """How many units of the run's own rows each step may be drawn from; None: all there are."""

    def __init__(self, config: RunConfig) -> None:
        self._new_units = new_units(config)
        self._is_needed = config.is_replay
        self._known = [0]

    def of(self, step: int) -> int | None:
        """Return what all steps up to this one have taken up."""
        if not self._is_needed:
            return None
        while len(self._known) <= step:
            self._known.append(self._known[-1] + self._new_units(len(self._known)))
        return self._known[step]
