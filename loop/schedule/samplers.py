"""From a configuration to the sampler that draws the rows of each step."""

from collections.abc import Mapping

from ...store import Store
from ...store.errors import ConfigError, nearest
from ...store.query import literal
from ...store.replay import (
    Fifo,
    Freshness,
    Mixture,
    Prioritized,
    Sampler,
    Source,
    Strategy,
    Supply,
    Uniform,
)
from ...store.side_columns import SideColumn, check, parse_all
from ..config import RunConfig, SourceConfig
from ..config.sampler import StrategyConfig
from ..losses import Algorithm
from .units import order, own_source

TO_TRAIN_ON = "purpose <> 'eval'"
"""The default condition on stored rows, which excludes those of evaluations."""

RowSampler = Sampler | Mixture
"""Draws the rows of training steps."""


def sampler(
    store: Store, config: RunConfig, algorithm: Algorithm, *, until: Mapping[str, int] | None = None
) -> RowSampler:
    """Return the sampler that draws the rows of a run's steps for its algorithm.

    With `until`, it sees only rows stored at these versions of the tables.
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
        # offline, rows are of other policies, whose age says nothing about this one
        freshness=Freshness(config.schedule.lag if is_online else None),
        grouped=algorithm.grouped,
        table=algorithm.table,
        where=trainer.and_where(
            None if is_online or trainer.source is not None else _stored_where(config, algorithm)
        ),
        query=trainer.source,
        run_id=config.name if is_online else None,
        with_columns=trainer.side_columns,
        max_draws=trainer.max_uses,
        seed=config.seed,
        until=until,
        order=order(config, algorithm) if is_online else None,
    )


def _stored_where(config: RunConfig, algorithm: Algorithm) -> str | None:
    """Return the default condition on stored rows, if the configuration has none."""
    is_open = config.trainer.where is None and algorithm.table == "experiences"
    return TO_TRAIN_ON if is_open else None


def _of_source(
    source: SourceConfig, config: RunConfig, algorithm: Algorithm, *, is_own: bool
) -> str | None:
    if is_own or any(one is not None for one in (source.where, source.run, source.source)):
        return source.where
    return _stored_where(config, algorithm)


def _source(name: str, source: SourceConfig, config: RunConfig, algorithm: Algorithm) -> Source:
    if algorithm.unit == "pair" and source.run is not None:
        raise ConfigError(
            f"source `{name}` draws from run `{source.run}`, but pairs have no run; choose them by "
            " `where: chosen_id IN (SELECT experience_id FROM experiences WHERE run_id = ...)`"
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
        with_columns=(*config.trainer.side_columns, *source.side_columns),
        max_draws=source.max_uses or (1 if is_own else None),
        order=order(config, algorithm) if is_own else None,
        is_paced=is_own,
    )


def strategy(config: StrategyConfig) -> Strategy:
    """Return the sampling strategy that a configuration names."""
    if config.prioritized is not None:
        return Prioritized(**dict(config.prioritized))
    if config.uniform is not None:
        return Uniform(**dict(config.uniform))
    return Fifo()


def own_sides(config: RunConfig) -> tuple[SideColumn, ...]:
    """Return the side columns that conditions on the explorer's rows may name."""
    _, own = own_source(config)
    return parse_all((*config.trainer.side_columns, *(own.side_columns if own else ())))


def check_sides(store: Store, config: RunConfig) -> None:
    """Raise NotFoundError for a side column without stored values.

    Except for priorities, which may be written while the run draws.
    """
    trainer = config.trainer
    columns = [c for c in parse_all(trainer.side_columns) if c.alias != "priority"]
    if columns:
        check(store if trainer.at is None else store.at(trainer.at), columns)


def check_runs(store: Store, sources: Mapping[str, SourceConfig]) -> None:
    """Raise ConfigError for a source that draws from an unknown run."""
    named = {name: source.run for name, source in sources.items() if source.run is not None}
    if not named:
        return
    rows = store.sql(
        "SELECT run_id FROM job_events UNION SELECT run_id FROM experiences"
    ).fetchall()
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
    """Return a hint on why the rows of an online step are missing."""
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


HOW = "make some from stored rollouts with the operator `pairs`, or `rlake import preferences FILE`"
"""How to fix a store without pairs."""


def nothing(store: Store) -> str | None:
    """Return an error message for a store without preferences, or None."""
    return None if store.count("preferences") else f"the store has no preferences; {HOW}"
