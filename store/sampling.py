"""Draws: which rows a training step gets, and with what weights. Freshness is enforced here.

A draw is a function of the rows in the index, what was drawn before, the step and the seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl

from .errors import QueryError
from .index import Index
from .store import Store


@dataclass(frozen=True)
class Freshness:
    """Which rows are young enough: their lag in optimizer steps is at most `max_lag`."""

    max_lag: int | None = None
    """None: rows of any age."""

    def keep(self, versions: np.ndarray, policy_version: int) -> np.ndarray:
        """Tell which units are fresh for weights of `policy_version`."""
        if self.max_lag is None:
            return np.ones(len(versions), np.bool_)
        return policy_version - versions <= self.max_lag  # NO_VERSION is newer than all


@dataclass(frozen=True)
class Pool:
    """What may be drawn: places of fresh units in canonical order, and how often each was drawn."""

    units: np.ndarray
    times_drawn: np.ndarray


class Strategy(Protocol):
    """Chooses `n` of the pool; returns places in the pool, and one weight each."""

    @property
    def name(self) -> str:
        """How the choice is recorded in `draws`, parameters included."""
        ...

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return places in the pool, and importance weights."""
        ...


@dataclass(frozen=True)
class Fifo:
    """Oldest first; when all were drawn as often, from the start again."""

    name: str = "fifo"

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `n` of those drawn least."""
        return np.argsort(pool.times_drawn, kind="stable")[:n], np.ones(n)


@dataclass(frozen=True)
class Uniform:
    """Each as likely as any other, none twice in one step."""

    name: str = "uniform"

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `n` different places at random."""
        return rng.choice(len(pool.units), n, replace=False), np.ones(n)


STRATEGIES: dict[str, type[Fifo] | type[Uniform]] = {"fifo": Fifo, "uniform": Uniform}


@dataclass(frozen=True)
class Supply:
    """What there is to draw from, in units, for a step that needs `need` of them."""

    need: int
    fresh: int
    stale: int
    used_up: int
    unit: str

    @property
    def enough(self) -> bool:
        """Whether the step can be drawn."""
        return self.fresh >= self.need

    def __str__(self) -> str:
        return (
            f"need {self.need} {self.unit}, have {self.fresh} fresh, {self.stale} stale, "
            f"{self.used_up} drawn as often as allowed"
        )


@dataclass(frozen=True)
class Draw:
    """The rows of one step, in order: addresses for `Sampler.read`, and what `draws` records."""

    step: int
    row_ids: np.ndarray
    allowed: np.ndarray
    """False for rows that are read only because their group's statistics need them."""
    weights: np.ndarray
    epochs: np.ndarray


class Sampler:
    """Draws rows for training steps from what the store holds, and remembers what it drew."""

    def __init__(
        self,
        store: Store,
        *,
        strategy: Strategy | None = None,
        freshness: Freshness | None = None,
        grouped: bool = False,
        where: str | None = None,
        run_id: str | None = None,
        max_draws: int | None = 1,
        seed: int = 0,
    ) -> None:
        """Draw from rows of `run_id` (any when None) for which the SQL condition `where` holds.

        Each unit (a group when `grouped`, else a row) is drawn at most `max_draws` times.
        """
        if max_draws is not None and max_draws < 1:
            raise QueryError(f"`max_draws` must be 1 or more, got {max_draws}")
        self.strategy = strategy or Fifo()
        self._store, self._freshness = store, freshness or Freshness()
        self._unit = "groups" if grouped else "rows"
        self._max_draws, self._seed = max_draws, seed
        self._index = Index(store, grouped=grouped, where=where, run_id=run_id)
        self._drawn: dict[int, int] = {}
        self._times = np.empty(0, np.int64)

    def supply(self, n: int, policy_version: int) -> Supply:
        """Look what is stored now, and say what a step that needs `n` units could draw from."""
        self._refresh()
        drawable = self._index.drawable
        open_ = drawable & self._open()
        fresh = open_ & self._freshness.keep(self._index.versions, policy_version)
        return Supply(
            n,
            int(fresh.sum()),
            int((open_ & ~fresh).sum()),
            int((drawable & ~open_).sum()),
            self._unit,
        )

    def draw(self, n: int, *, step: int, policy_version: int) -> Draw | None:
        """Draw `n` units for a step, or None when there are not so many fresh ones."""
        if not self.supply(n, policy_version).enough:
            return None
        keep = self._freshness.keep(self._index.versions, policy_version)
        units = np.flatnonzero(self._index.drawable & self._open() & keep)
        rng = np.random.default_rng([self._seed, step])
        places, weights = self.strategy.choose(Pool(units, self._times[units]), n, rng)
        return self._take(step, units[places], weights)

    def redraw(self, experience_ids: Sequence[str], *, step: int) -> Draw:
        """Draw again what an earlier attempt drew for this step, in its order."""
        self._refresh()
        units = self._index.find(experience_ids)
        return self._take(step, units, np.ones(len(units)))

    def restore(self, experience_ids: Sequence[str]) -> None:
        """Count these rows as drawn once more each: the state after the last checkpoint."""
        self._refresh()
        counts = pl.Series(experience_ids, dtype=pl.String).value_counts(name="n")
        for n, ids in counts.group_by("n"):
            units = self._index.find(ids.to_series(0).to_list())
            self._count(units, int(str(n[0])))

    def read(self, draw: Draw, columns: Sequence[str]) -> pl.DataFrame:
        """Read the payload of a draw, one row for each of `row_ids`, in order."""
        # The public `take_row_ids` of lancedb neither keeps the order nor reads a pinned version.
        dataset = self._store.dataset("experiences")
        table = dataset._take_rows(  # pyright: ignore[reportPrivateUsage]
            draw.row_ids.tolist(), columns=list(columns)
        )
        return pl.DataFrame(pl.from_arrow(table)).with_columns(pl.Series("allowed", draw.allowed))

    def _take(self, step: int, units: np.ndarray, weights: np.ndarray) -> Draw:
        self._count(units, 1)
        rows = self._index.rows_of(units)
        sizes = self._index.starts[units + 1] - self._index.starts[units]
        return Draw(
            step,
            self._index.row_ids[rows],
            self._index.allowed[rows],
            np.repeat(weights, sizes),
            np.repeat(self._times[units], sizes),
        )

    def _open(self) -> np.ndarray:
        """Tell which units were drawn less often than is allowed."""
        if self._max_draws is None:
            return np.ones(len(self._times), np.bool_)
        return self._times < self._max_draws

    def _count(self, units: np.ndarray, times: int) -> None:
        self._times[units] += times
        for key in self._index.names[units].tolist():
            self._drawn[key] = self._drawn.get(key, 0) + times

    def _refresh(self) -> None:
        """Follow the store; counts stay with their rows, also when places in the index changed."""
        if not self._index.refresh():
            return
        times = np.zeros(len(self._index), np.int64)
        known = len(self._times)
        if self._index.rebuilt:
            times[:] = [self._drawn.get(key, 0) for key in self._index.names.tolist()]
        else:
            times[:known] = self._times
        self._times = times
