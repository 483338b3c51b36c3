"""The weights of units: the priorities of their rows, updated as rows and values arrive."""

from collections.abc import Callable
from typing import Protocol

import lance
import numpy as np
import polars as pl
import pyarrow as pa

from ..schema import TABLES
from ..schema_versions import take
from ..store import Store
from .growable_arrays import GrowableArray
from .latest_values import SideValues
from .priority import Priority

_AT_ONCE = 65_536
"""Units that are weighed again together when side columns changed."""
_CHUNKS = 8


class RowArrays(Protocol):
    """What the weights read of their index: its rows, and which rows make up a unit."""

    @property
    def grouped(self) -> bool:
        """Whether units are groups, not single rows."""
        ...

    @property
    def row_ids(self) -> np.ndarray:
        """The address of each row."""
        ...

    @property
    def hashes(self) -> np.ndarray:
        """A hash of each row's id."""
        ...

    @property
    def allowed(self) -> np.ndarray:
        """Whether each row may be drawn."""
        ...

    @property
    def times(self) -> np.ndarray:
        """How often each unit was drawn."""
        ...

    def sizes(self, units: np.ndarray) -> np.ndarray:
        """Return the number of rows of each unit."""
        ...

    def rows_of(self, units: np.ndarray) -> np.ndarray:
        """Return the indices of all rows of the given units, unit by unit."""
        ...


class UnitWeights:
    """Masses of units.

    For a priority that changes from draw to draw, the columns it reads are kept. For any other, its
    value is kept, and computed again when a side column of the row changes.
    """

    def __init__(
        self,
        store: Store,
        priority: Priority,
        masses: Callable[[np.ndarray], np.ndarray],
        *,
        sides: SideValues,
        table: str = "experiences",
    ) -> None:
        """Weigh by `masses` of the priorities."""
        self.priority = priority
        self._store, self._masses_of = store, masses
        self._table, self._key = table, TABLES[table].key[0]
        self._sides, self._names = sides, [side.alias for side in priority.sides]
        self.clear()

    def clear(self) -> GrowableArray:
        """Forget all units; return the new array of masses."""
        self.masses = GrowableArray(np.float64)
        self._kept: pl.DataFrame | None = None
        return self.masses

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds, without the masses."""
        return int(self._kept.estimated_size()) if self._kept is not None else 0

    def of(self, table: pa.Table, rows: pl.DataFrame) -> pl.DataFrame:
        """Return what to keep of new rows: their priority, or the columns that it reads."""
        if self.priority.dynamic:
            sides = self._sides.of(rows["hash"].to_numpy(), self._names)
            facts = [pl.Series(name, table.column(name)) for name in self.priority.facts]
            return pl.DataFrame(
                [column.alias(f"kept {column.name}") for column in [*facts, *sides]]
            )
        table = self._with_sides(table.select(self.priority.facts), rows["hash"].to_numpy())
        values = self.priority.of(table)
        bad = self.priority.check(values, rows["allowed"].to_numpy())
        if bad is not None:
            raise self.priority.refusal(rows[self._key][bad], values[bad])
        return values.fill_null(float("nan")).alias("priority").to_frame()

    def _with_sides(self, rows: pa.Table, hashes: np.ndarray) -> pa.Table:
        if not rows.num_columns:  # an expression of constants, or of side columns, needs rows too
            rows = pa.table({"constant": np.zeros(len(hashes), np.int8)})
        return self._sides.join(rows, hashes, self._names)

    def keep(self, index: RowArrays, new: np.ndarray, rows: pl.DataFrame) -> None:
        """Keep the priorities of new units, or the columns that they read."""
        self.masses.extend(np.ones(len(new)))
        if not self.priority.dynamic:
            self._set(index, new, rows["priority"].to_numpy())
            return
        kept = [c for c in rows.columns if c.startswith("kept ")]
        frame = rows.select("policy_version", *kept).rename(
            {c: c.removeprefix("kept ") for c in kept}
        )
        self._kept = frame if self._kept is None else self._kept.vstack(frame)
        # each commit adds a chunk, and gathering from many is slow
        if self._kept.n_chunks() > _CHUNKS:
            self._kept = self._kept.rechunk()

    def _set(self, index: RowArrays, units: np.ndarray, priorities: np.ndarray) -> None:
        """Set the masses of units from the priorities of all their rows."""
        if index.grouped:
            priorities = _means(index, units, priorities)
        self.masses.values[units] = self._masses_of(priorities)

    def again(self, index: RowArrays, units: np.ndarray, dataset: lance.LanceDataset) -> None:
        """Recompute the priorities of units whose side columns changed."""
        for start in range(0, len(units), _AT_ONCE):
            some = units[start : start + _AT_ONCE]
            rows = index.rows_of(some)
            if self.priority.dynamic:
                self._keep_again(rows, index.hashes[rows])
                continue
            facts = take(dataset, index.row_ids[rows].tolist(), self.priority.facts)
            values = self.priority.of(self._with_sides(facts, index.hashes[rows]))
            self._check(index, values, rows, dataset)
            self._set(index, some, values.fill_null(float("nan")).to_numpy())

    def _keep_again(self, rows: np.ndarray, hashes: np.ndarray) -> None:
        assert self._kept is not None, "there are units"
        for new in self._sides.of(hashes, self._names):
            known = self._kept[new.name].rechunk()
            self._kept = self._kept.with_columns(known.scatter(rows, new))

    def weigh(self, index: RowArrays, units: np.ndarray, policy_version: int) -> None:
        """Set the masses of these units for a draw at `policy_version`, all others to 0.

        For a priority that uses `age` or `times_drawn`.
        """
        # all units: one that is not in this draw must not keep its mass from an earlier draw
        self.masses.values[:] = 0.0
        if not len(units) or self._kept is None:
            return
        rows = index.rows_of(units)
        age = pl.lit(policy_version, pl.Int64) - pl.col("policy_version").cast(pl.Int64)
        times = pl.Series(
            "times_drawn", np.repeat(index.times[units], index.sizes(units)), pl.Int64
        )
        facts = self._kept[rows].with_columns(times, age=age.clip(0, None)).drop("policy_version")
        values = self.priority.of(facts.to_arrow())
        self._check(index, values, rows, self._store.dataset(self._table))
        self._set(index, units, values.fill_null(float("nan")).to_numpy())

    def _check(
        self, index: RowArrays, values: pl.Series, rows: np.ndarray, dataset: lance.LanceDataset
    ) -> None:
        bad = self.priority.check(values, index.allowed[rows])
        if bad is not None:
            ids = take(dataset, [int(index.row_ids[rows[bad]])], [self._key])
            raise self.priority.refusal(ids.column(0)[0].as_py(), values[bad])


def _means(index: RowArrays, units: np.ndarray, priorities: np.ndarray) -> np.ndarray:
    """Return the mean over each unit's allowed rows that have a priority, NaN if none has."""
    if not len(units):
        return np.empty(0)
    counts = index.allowed[index.rows_of(units)] & ~np.isnan(priorities)
    starts = np.append(0, np.cumsum(index.sizes(units))[:-1]).astype(np.int64)
    total = np.add.reduceat(np.where(counts, priorities, 0.0), starts)
    number = np.add.reduceat(counts.astype(np.int64), starts)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan)
