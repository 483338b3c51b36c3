"""From a configuration to what draws a step's rows, and to how many new ones each step takes up."""

from collections.abc import Callable, Mapping
from math import ceil

from ...store import Store
from ...store.errors import ConfigError, nearest
from ...store.query import literal
from ...store.replay import (
    Fifo,
    Freshness,
    Mixture,
    Order,
    Prioritized,
    Sampler,
    Source,
    Strategy,
    Supply,
    Uniform,
    most,
    split,
)
from ...store.side_columns import SideColumn, check, parse_all
from ..algorithms import Algorithm
from ..config import RunConfig, SourceConfig
from ..config.sampler import StrategyConfig
from ..trainer.preferences import nothing

NOT_MEASURED = "run_id IS NULL OR run_id NOT LIKE '%:eval-%'"
"""Which stored rows are drawn where nobody says which: none that only measures a policy."""

Drawing = Sampler | Mixture
"""What gives a training step its rows."""


def sampler(
    store: Store, config: RunConfig, algorithm: Algorithm, *, until: Mapping[str, int] | None = None
) -> Drawing:
    """Return what draws the steps of a run from rows of a store, as its algorithm wants them.

    With `until`, only rows that were stored at these versions of the tables are seen.
    """
    trainer, is_online = config.trainer, config.explorer is not None
    if trainer.sampler.mixed is not None:
        sources = {
            name: _source(name, source, config, algorithm)
            for name, source in trainer.sampler.mixed.items()
        }
        return Mixture(
            store,
            sources,
            grouped=algorithm.grouped,
            table=algorithm.table,
            seed=config.seed,
            until=until,
        )
    return Sampler(
        store if trainer.at is None else store.at(trainer.at),
        strategy=strategy(trainer.sampler),
        freshness=Freshness(config.schedule.lag if is_online else None),
        grouped=algorithm.grouped,
        table=algorithm.table,
        where=trainer.and_where(
            None if is_online or trainer.source is not None else _stored_where(config, algorithm)
        ),
        query=trainer.source,
        run_id=config.name if is_online else None,
        with_columns=trainer.with_columns,
        max_draws=trainer.epochs,
        seed=config.seed,
        until=until,
        order=order(config, algorithm) if is_online else None,
    )


def order(config: RunConfig, algorithm: Algorithm) -> Order:
    """Return in which order a run's own rows are taken up while its explorer makes them.

    By arrival when it streams; else in the order of its batches, whoever was faster.
    """
    if config.schedule.stream:
        return Order(by_arrival=True)
    return Order(groups_per_step=batch_tasks(config, algorithm))


def batch_tasks(config: RunConfig, algorithm: Algorithm) -> int:
    """Return how many tasks each of the explorer's batches has: enough for its part of a step."""
    explorer = config.explorer
    assert explorer is not None, "a run that explores has an explorer"
    per_group = 1 if algorithm.grouped else explorer.group_size or algorithm.group_size
    needed = explorer.tasks_per_batch or ceil(_most_own_units(config) / per_group)
    over = explorer.over_sample
    return ceil(needed * (1 + over.ratio)) if over and not config.schedule.stream else needed


def _stored_where(config: RunConfig, algorithm: Algorithm) -> str | None:
    """Return the condition on stored rows where the configuration has none."""
    is_open = config.trainer.where is None and algorithm.table == "experiences"
    return NOT_MEASURED if is_open else None


def _of_source(
    source: SourceConfig, config: RunConfig, algorithm: Algorithm, *, is_own: bool
) -> str | None:
    if is_own or any(one is not None for one in (source.where, source.run, source.source)):
        return source.where
    return _stored_where(config, algorithm)


def _source(name: str, source: SourceConfig, config: RunConfig, algorithm: Algorithm) -> Source:
    if algorithm.unit == "pair" and source.run is not None:
        raise ConfigError(
            f"source `{name}` draws from run `{source.run}`, but pairs are of no run; choose them "
            "by `where: chosen_id IN (SELECT experience_id FROM experiences WHERE run_id = ...)`"
        )
    is_own = config.explorer is not None and not source.is_stored
    lag = config.schedule.lag if is_own and source.max_lag is None else source.max_lag
    return Source(
        share=source.share,
        run_id=config.name if is_own else source.run,
        where=config.trainer.and_where(_of_source(source, config, algorithm, is_own=is_own)),
        query=source.source,
        at=source.at,
        strategy=strategy(source.sampler),
        freshness=Freshness(lag),
        with_columns=(*config.trainer.with_columns, *source.with_columns),
        max_draws=source.epochs or (1 if is_own else None),
        order=order(config, algorithm) if is_own else None,
        is_paced=is_own,
    )


def strategy(config: StrategyConfig) -> Strategy:
    """Return the way of drawing that a configuration names."""
    if config.prioritized is not None:
        return Prioritized(**dict(config.prioritized))
    if config.uniform is not None:
        return Uniform(**dict(config.uniform))
    return Fifo()


def new_units(config: RunConfig) -> Callable[[int], int]:
    """Return how many units of the explorer's each training step is the first to take up.

    Drawn once, they are the batch, or that part of it that comes from the run itself. Drawn several
    times, the first step takes up a batch, and each later one `schedule.new_per_step`. That, and
    not how far the explorer happens to be, decides what a step is drawn from.
    """
    trainer = config.trainer
    name, own = own_source(config)
    size, epochs = _most_own_units(config), trainer.epochs
    if own is not None:
        epochs = own.epochs or 1
    if config.is_replay:
        later = config.schedule.new_per_step or ceil(size / epochs)
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


def own_sides(config: RunConfig) -> tuple[SideColumn, ...]:
    """Return the side columns of the explorer's rows, which that condition may name."""
    _, own = own_source(config)
    return parse_all((*config.trainer.with_columns, *(own.with_columns if own else ())))


def check_sides(store: Store, config: RunConfig) -> None:
    """Raise NotFoundError for a side column of which nothing is stored, but for priorities.

    Those may come while the run draws.
    """
    trainer = config.trainer
    columns = [c for c in parse_all(trainer.with_columns) if c.alias != "priority"]
    if columns:
        check(store if trainer.at is None else store.at(trainer.at), columns)


def check_runs(store: Store, sources: Mapping[str, SourceConfig]) -> None:
    """Raise ConfigError for a source that draws from a run that the store does not know."""
    named = {name: source.run for name, source in sources.items() if source.run is not None}
    if not named:
        return
    rows = store.sql("SELECT run_id FROM runs UNION SELECT run_id FROM experiences").fetchall()
    known = {run for (run,) in rows if run is not None}
    for name, run in named.items():
        if run not in known:
            raise ConfigError(
                f"source `{name}` draws from run `{run}`, of which nothing is stored"
                f"{nearest(run, known)}"
            )


def nothing_to_draw(store: Store, algorithm: Algorithm, supply: Supply) -> ConfigError:
    """Return the error of an offline run for which no row is stored."""
    none = nothing(store) if algorithm.unit == "pair" else None
    way_out = none or "look at `trainer.where`, `trainer.source` and `trainer.at`"
    return ConfigError(f"there is nothing to train on: {supply}; {way_out}")


def missing(store: Store, config: RunConfig, supply: Supply) -> str:
    """Say what to look at when the rows of an online step do not come."""
    own, _ = own_source(config)
    short = [name for name, part in supply.parts.items() if not part.enough and name != own]
    if short:
        return f"nothing in this run adds rows to source `{short[0]}`: look at what it draws from"
    part = supply.parts.get(own or "", supply)
    stored = f"SELECT count(*) FROM experiences WHERE run_id = {literal(config.name)}"
    [(num_rows,)] = store.sql(stored).fetchall()
    if num_rows and not part.fresh + part.stale + part.used_up + part.weightless:
        return f"of {num_rows} stored rows `where` or their `drop_reason` leaves out all"
    return "is its explorer running?"


class Horizon:
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
