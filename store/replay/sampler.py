"""The sampler draws stored rows for training steps, and counts how often each was drawn.

A draw is a function of the rows in the index, what was drawn before, the step and the seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import lance
import numpy as np
import polars as pl

from ..errors import QueryError, StoreError
from ..schema_versions import take
from ..side_columns import REPLACEABLE, SideColumn, attach, parse_all
from ..store import Store
from .draw import Draw, Freshness, Order, Supply, check_size
from .filters import hashed
from .growable_arrays import repeats
from .preference_pairs import Pairs
from .row_index import Index
from .strategies import Fifo, Strategy, canonical
from .unit_pool import Pool

T = TypeVar("T")
_NAMED = pl.List(pl.Struct({"name": pl.String, "value": pl.Float64}))


class Sampler:
    """Draws stored rows for training steps, and counts how often each was drawn."""

    def __init__(
        self,
        store: Store,
        *,
        strategy: Strategy | None = None,
        freshness: Freshness | None = None,
        grouped: bool = False,
        table: str = "experiences",
        where: str | None = None,
        query: str | None = None,
        run_id: str | None = None,
        with_columns: Sequence[str | SideColumn] = (),
        max_draws: int | None = 1,
        seed: int = 0,
        name: str | None = None,
        until: Mapping[str, int] | None = None,
        order: Order | None = None,
    ) -> None:
        """Draw from rows of `run_id` (any when None) for which the SQL condition `where` holds.

        From the table `preferences`, pairs are drawn: each gives the rows of its two experiences,
        the chosen one first, and `where`, `query` and priorities are over `preferences`.

        Each unit (a group when `grouped`, else a row) is drawn at most `max_draws` times; None is
        no limit. `query` is one SELECT that returns the ids of the rows to draw from.
        `where`, `query` and the strategy's priority may name the side columns `with_columns`, which
        replace stored columns of the same name. `name` identifies this source in draws, and is part
        of its random seed. With `until`, versions by table, only rows stored by then are seen.
        `order` is the order of rows that arrive while they are drawn.

        Raises QueryError for errors that can be found before there are rows.
        """
        if max_draws is not None and max_draws < 1:
            raise QueryError(f"`max_draws` must be 1 or more, got {max_draws}")
        if seed < 0:
            raise QueryError(f"`seed` must be 0 or more, got {seed}")
        self.strategy = strategy or Fifo()
        self.name = name
        self._store, self._freshness = store, freshness or Freshness()
        self._pairs = Pairs(store) if table == "preferences" else None
        self.unit = "pairs" if self._pairs else "groups" if grouped else "rows"
        """What is drawn."""
        self._max_draws, self._seed = max_draws, seed
        self._sides = parse_all(with_columns)
        self._chosen_by = {
            "where": where,
            "query": query,
            "run_id": run_id,
            "with_columns": [_spec(c) for c in with_columns] or None,
            **({"order": "arrival"} if order is not None and order.by_arrival else {}),
        }
        self._index = Index(
            store,
            grouped=grouped,
            table=table,
            where=where,
            query=query,
            run_id=run_id,
            strategy=self.strategy,
            sides=self._sides,
            until=until,
            order=order,
        )
        weighing = self._index.weighing
        self._weighing = weighing if weighing and weighing.priority.dynamic else None
        self._past: lance.LanceDataset | None = None
        self._pool = Pool(self._index.units, max_draws=self._max_draws)
        self._weighed: tuple[int, int | None] | None = None

    @property
    def drawn_from(self) -> dict[str, int]:
        """The version of each table that was looked at last."""
        return self._index.drawn_from

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        return self._index.nbytes + (self._pairs.nbytes if self._pairs else 0)

    def __len__(self) -> int:
        return len(self._index)

    def describe(self) -> str:
        """Return how rows are chosen, with all parameters, as canonical JSON text."""
        return canonical(self.parameters())

    def parameters(self) -> dict[str, Any]:
        """Return its parameters as JSON values; None means the default."""
        return {
            **self.strategy.parameters(),
            **self._chosen_by,
            "unit": self.unit,
            "max_lag": self._freshness.max_lag,
            "max_draws": self._max_draws,
            "seed": self._seed,
        }

    # looking

    def refresh(self) -> None:
        """Read what was stored since the last look."""
        if self._index.refresh():
            self._weighed = None
        # a rebuild changes the positions of units, on which all sums of the pool are based
        if self._index.rebuilt:
            self._pool = Pool(self._index.units, max_draws=self._max_draws)
        else:
            self._pool.touch(self._index.touched)

    def supply(
        self, n: int, policy_version: int, *, step: int = 1, horizon: int | None = None
    ) -> Supply:
        """Read new rows, and return the supply for a step that needs `n` units.

        Only the first `horizon` drawable units in canonical order count, so that the rows of a step
        do not depend on how far the explorer is ahead. `step` matters only to a mixture.
        """
        del step
        self.refresh()
        return self.count(n, policy_version, horizon=horizon)

    def count(self, n: int, policy_version: int, *, horizon: int | None = None) -> Supply:
        """Return the supply as of the last refresh."""
        pool = self._look(policy_version, horizon)
        fresh = pool.size
        draws = pool.room if self.strategy.replacement else fresh
        return Supply(
            n,
            fresh,
            pool.open - pool.fresh,
            pool.drawable - pool.open,
            self.unit,
            weightless=pool.fresh - fresh,
            draws=draws,
        )

    def check(self, n: int) -> None:
        """Raise QueryError when it is certain that no step can ever draw `n` units.

        A past state of a store gains no rows, so it must have enough now.
        """
        check_size(n, self.unit)
        supply = self.supply(n, 0)
        dynamic = self._weighing is not None
        hope = supply.weightless if dynamic else 0  # a weight of 0 may change from draw to draw
        if self._store.is_past and not supply.enough and not hope:
            raise QueryError(
                f"such a step can never be drawn: {supply}, and nothing is added to {self._store!r}"
                "; draw fewer at once, more often, or look at `where`"
            )

    def _look(self, policy_version: int, horizon: int | None) -> Pool:
        pool, index = self._pool, self._index
        pool.look(oldest=self._freshness.oldest(policy_version), horizon=horizon)
        if self._weighing is not None:
            # weights depend on the policy by `age`, and on the horizon by which units take part
            if self._weighed != (policy_version, horizon):
                self._weighing.weigh(index, pool.candidates(), policy_version)
                pool.touch_all()
                pool.look(oldest=self._freshness.oldest(policy_version), horizon=horizon)
            self._weighed = policy_version, horizon
        return pool

    # drawing

    def draw(
        self, n: int, *, step: int, policy_version: int, horizon: int | None = None
    ) -> Draw | None:
        """Draw `n` units for a step, or None when too few are fresh."""
        check_size(n, self.unit)
        self.refresh()
        return self.choose(n, step=step, policy_version=policy_version, horizon=horizon)

    def choose(
        self, n: int, *, step: int, policy_version: int, horizon: int | None = None
    ) -> Draw | None:
        """Draw from the rows of the last refresh."""
        if not self.count(n, policy_version, horizon=horizon).enough:
            return None
        # seeded by the step, not by earlier draws: a resumed run must draw the same rows
        rng = np.random.default_rng([self._seed, step, *(self.name or "").encode()])
        units, weights = self.strategy.choose(self._pool, n, rng)
        return self._take(step, units, weights)

    def redraw(
        self,
        ids: Sequence[str],
        *,
        step: int,
        weights: Sequence[float] | None = None,
        sources: Sequence[str | None] | None = None,
        drawn_from: Mapping[str, int] | None = None,
    ) -> Draw:
        """Draw again what an earlier attempt drew for this step, in its order.

        `ids` are those of its rows; for pairs, the preference's id for each of its two rows.
        `weights` and `drawn_from` are those recorded with the ids; `sources` matter only to a
        mixture.
        """
        del sources
        self.refresh()
        ids, weights = self._once(ids), None if weights is None else self._once(weights)
        units = self._index.find(ids)
        message = np.ones(len(units))
        if weights is not None:  # unusable rows of a group were recorded with weight 0
            named, at = np.unique(self._index.unit_of(ids), return_inverse=True)
            largest = np.zeros(len(named))
            np.maximum.at(largest, at, weights)
            message = largest[np.searchsorted(named, units)]
        used = ids if weights is None else [i for i, w in zip(ids, weights, strict=True) if w]
        draw = self._take(step, units, message, again=(ids, used))
        return replace(draw, drawn_from=dict(drawn_from)) if drawn_from else draw

    def restore(self, ids: Sequence[str], *, sources: Sequence[str | None] | None = None) -> None:
        """Count these rows as drawn, once for each time they are listed; pairs as for `redraw`.

        These counts are the whole state of a sampler: a draw depends only on them, the seed, the
        step and the stored rows.
        """
        del sources
        self.refresh()
        self._count(self._index.find(self._once(ids)))

    def _once(self, of_rows: Sequence[T]) -> Sequence[T]:
        """Return one entry per pair of the two for its rows."""
        return of_rows[::2] if self._pairs else of_rows

    def read(self, draw: Draw, columns: Sequence[str]) -> pl.DataFrame:
        """Read the payload of a draw, one row for each of `row_ids`, in order.

        Pairs have their `preference_id` and `margin` too; of a missing row all but its id is NULL.
        Raises StoreError when some of them were deleted since they were drawn.
        """
        allowed = pl.Series("allowed", draw.allowed)
        if self._pairs:
            return self._pairs.read(draw.row_ids[::2].tolist(), columns).with_columns(allowed)
        table = take(self._dataset(), draw.row_ids.tolist(), columns)
        if table.num_rows != len(draw):
            raise StoreError(
                f"{len(draw) - table.num_rows} of {len(draw)} drawn rows are gone: a retention "
                "rule or a restore took them since; draw again"
            )
        return pl.DataFrame(pl.from_arrow(table)).with_columns(allowed)

    def with_sides(self, draw: Draw, rows: pl.DataFrame) -> pl.DataFrame:
        """Add the side columns to rows of `read`, as their values were when these were drawn.

        A stored column of the name is replaced, and the column `replaced` says by what. A priority
        is added only where the rows have one: else nothing but the draw reads it.
        """
        sides = [c for c in self._sides if c.alias != "priority" or c.alias in rows.columns]
        rows = attach(self._store, rows, sides, until=draw.drawn_from)
        named = [c.alias for c in sides if c.alias in REPLACEABLE]
        values = [pl.struct(name=pl.lit(n), value=pl.col(n).cast(pl.Float64)) for n in named]
        message = pl.concat_list(values) if values else pl.lit(None, _NAMED)
        return rows.with_columns(replaced=message.cast(_NAMED))

    def _dataset(self) -> lance.LanceDataset:
        if not self._store.is_past:
            return self._store.dataset("experiences")
        # Opened once, because the past does not change.
        if self._past is None:
            self._past = self._store.dataset("experiences")
        return self._past

    def _take(
        self,
        step: int,
        units: np.ndarray,
        weights: np.ndarray,
        *,
        again: tuple[Sequence[str], Sequence[str]] = ((), ()),
    ) -> Draw:
        """Return these units' rows: of those taken back, which are drawn `again`, and used."""
        index = self._index
        # before counting: `+ 1` stands for this draw
        epochs = index.times[units] + 1 + repeats(units)
        self._count(units)
        rows, sizes = index.rows_of(units), index.sizes(units)
        allowed = index.allowed[rows]
        if index.gone is not None and len(rows):
            gone, hashes = index.gone[rows], index.hashes[rows]
            drawn, used = (
                np.isin(hashes, hashed(pl.Series(ids, dtype=pl.String))) for ids in again
            )
            stays = ~gone | drawn
            sizes = np.add.reduceat(stays, np.cumsum(sizes) - sizes, dtype=np.int64)
            rows, allowed = rows[stays], (allowed | (gone & used))[stays]
        if self._pairs:
            rows, allowed, sizes = np.repeat(rows, 2), np.repeat(allowed, 2), 2 * sizes
        return Draw(
            step,
            index.row_ids[rows],
            allowed,
            np.repeat(weights, sizes),
            np.repeat(epochs, sizes),
            (self.name,) * len(rows),
            index.drawn_from,
        )

    def _count(self, units: np.ndarray) -> None:
        self._index.count(units)
        # Their sums change, and so may priorities, by `times_drawn`.
        self._pool.touch(units)
        self._weighed = None


def _spec(column: str | SideColumn) -> str:
    return column if isinstance(column, str) else f"{column.alias}={column.table}.{column.value}"
