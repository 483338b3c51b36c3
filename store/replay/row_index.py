"""The index of rows that may be drawn: tens of bytes per row, updated from new versions only."""

from collections.abc import Iterator, Mapping, Sequence

import lance
import numpy as np
import polars as pl
import pyarrow as pa

from ..changes import ChangeFeed
from ..schema import TABLES
from ..schema_versions import take
from ..side_columns import SideColumn
from ..store import Store
from .draw import Behind, Order
from .filters import Conditions, hashed
from .growable_arrays import GrowableArray, Places, repeats
from .latest_values import SideValues
from .priority import Priority
from .strategies import Strategy
from .unit_pool import NO_VERSION, UnitPool
from .unit_weights import UnitWeights
from .withdrawals import Withdrawn

_ORDERED = ("group_id", "batch", "policy_version")
"""Columns that order rows; without them, all rows of a table belong to one batch."""
_HEAVY = {
    *(f.name for f in TABLES["experiences"].schema if pa.types.is_list(f.type)),
    *("messages", "tools", "prompt_text", "response_text", "metadata", "sampling"),
}
_AT_ONCE = 4096
"""Rows whose texts and lists are in memory together."""
_NOWHERE = np.empty(0, np.int64)


class Index:
    """Rows of a table in one canonical order, divided into units: single rows or whole groups.

    The order is by batch, group and id, so that the same rows give the same index on any machine
    and in whatever order they arrived. A unit may be drawn when any of its rows may. `where` and
    `query` may read other tables; their results then follow those tables.
    """

    def __init__(
        self,
        store: Store,
        *,
        grouped: bool,
        table: str = "experiences",
        where: str | None = None,
        query: str | None = None,
        run_id: str | None = None,
        strategy: Strategy | None = None,
        sides: Sequence[SideColumn] = (),
        until: Mapping[str, int] | None = None,
        order: Order | None = None,
    ) -> None:
        """Follow rows of `table`, of `run_id` (all when None), stored `until` versions.

        `where`, `query`, `strategy`, `sides` and `order` are as for `Sampler`.
        """
        self._order = order or Order()
        self._store, self.grouped, self._run_id = store, grouped, run_id
        self._table, self._key = table, TABLES[table].key[0]
        self._always = (self._key, *(c for c in _ORDERED if c in TABLES[table].names))
        self._until = dict(until) if until is not None else None
        self._conditions = Conditions(
            store, where=where, query=query, until=self._until, table=table, sides=sides
        )
        self._withdrawn = Withdrawn(store, table=table, until=self._until)
        self._judging = [side.alias for side in self._conditions.sides]
        own = sides if table == "experiences" else ()
        read = set(self._judging)
        priority = None
        if strategy is not None and strategy.priority is not None:
            priority = Priority(strategy.priority, own, table=table)
            read |= {side.alias for side in priority.sides}
        self._sides = SideValues(store, own, read=read, until=self._until)
        self.weighing: UnitWeights | None = None
        """The weights of units, for a strategy with a priority."""
        if strategy is not None and priority is not None:
            self.weighing = UnitWeights(
                store, priority, strategy.masses, sides=self._sides, table=table
            )
        facts = self.weighing.priority.facts if self.weighing else ()
        columns = {*self._always, *self._conditions.columns, *facts}
        columns |= {"group_index"} if self._order.groups_per_batch else set()
        self._heavy = sorted(columns & _HEAVY)
        self._columns = sorted(columns - _HEAVY)
        self._ledger = np.empty(0, np.uint64), np.empty(0, np.int32)
        self._is_broken = False
        self.rebuilt = False
        """Whether the last `refresh` changed the places of units."""
        self.touched = _NOWHERE
        """Units that other side values gave another priority, or let be drawn or not.

        That is since the last `refresh`, when it was no rebuild.
        """
        self._clear()

    def _clear(self) -> None:
        until = self._until.get(self._table) if self._until is not None else None
        columns = sorted({*self._columns, *self._withdrawn.columns})
        self._tail = ChangeFeed(columns, run_id=self._run_id, until=until)
        self._last: tuple[object, ...] | None = None
        whole = self._order.groups_per_batch
        self._behind = Behind(whole) if whole else None
        self._row_ids, self._hashes = GrowableArray(np.uint64), GrowableArray(np.uint64)
        self._allowed, self._gone = GrowableArray(np.bool_), GrowableArray(np.bool_)
        self._places = Places()
        self._starts, self._names = GrowableArray(np.int64), GrowableArray(np.uint64)
        self._starts.extend(np.zeros(1, np.int64))
        self.units = UnitPool(
            drawable=GrowableArray(np.bool_) if self.grouped else self._allowed,
            versions=GrowableArray(np.int32, fill=NO_VERSION),
            times=GrowableArray(np.int32),
            masses=self.weighing.clear() if self.weighing else None,
        )

    def __len__(self) -> int:
        return len(self.units.versions)

    @property
    def row_ids(self) -> np.ndarray:
        """The address of each row."""
        return self._row_ids.values

    @property
    def hashes(self) -> np.ndarray:
        """A hash of each row's id."""
        return self._hashes.values

    @property
    def allowed(self) -> np.ndarray:
        """Whether each row may be drawn."""
        return self._allowed.values

    @property
    def gone(self) -> np.ndarray | None:
        """Whether each row was taken back, so that only old steps draw it; None: no row."""
        return self._gone.values if len(self._gone) else None

    @property
    def starts(self) -> np.ndarray:
        """Unit u is rows starts[u] to starts[u + 1]."""
        return self._starts.values if self.grouped else np.arange(len(self) + 1)

    @property
    def names(self) -> np.ndarray:
        """A hash of each unit's name."""
        return self._names.values if self.grouped else self._hashes.values

    @property
    def versions(self) -> np.ndarray:
        """Oldest policy version of each unit, NO_VERSION where none of its rows has one."""
        return self.units.versions.values

    @property
    def drawable(self) -> np.ndarray:
        """Whether each unit has a row that may be drawn."""
        return self.units.drawable.values

    @property
    def times(self) -> np.ndarray:
        """How often each unit was drawn."""
        return self.units.times.values

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that it holds."""
        held = [*vars(self).values(), *vars(self.units).values(), *self._ledger]
        kinds = GrowableArray | Places | np.ndarray
        # By identity: an array that is held twice is counted once.
        arrays = {id(array): array.nbytes for array in held if isinstance(array, kinds)}
        other = self._sides.nbytes + (self.weighing.nbytes if self.weighing else 0)
        return sum(arrays.values()) + other

    @property
    def drawn_from(self) -> dict[str, int]:
        """The version of each table that it was read from."""
        versions = {self._table: self._tail.version} | self._conditions.versions
        versions |= self._withdrawn.versions
        return dict(sorted((versions | self._sides.versions).items()))

    # following the store

    def refresh(self) -> bool:
        """Read what was stored since the last call; return whether anything changed.

        All rows are read again when new rows sort before known ones (a late group, a second
        import) or belong to a known group, when rows were deleted, and when tables that `where` or
        `query` read have new rows. Then positions of units change, and `rebuilt` is true.
        """
        self.rebuilt, self.touched = False, _NOWHERE
        try:
            return self._follow()
        except BaseException:
            # some arrays may have grown and others not: the next refresh reads all rows again
            self._is_broken = True
            raise

    def _follow(self) -> bool:
        if self._store.is_past and self._tail.version and not self._is_broken:
            return False
        if self._withdrawn.follow() or self._is_broken or self._conditions.follow():
            self._rebuild()
            # again: `or` skips it when an earlier operand is true
            self._conditions.follow()
        # before the rows are read: conditions on new rows use these values
        changed = self._sides.refresh()
        dataset = self._store.dataset(self._table)
        known, known_rows = len(self), len(self._row_ids)
        rows = self._read(dataset) if self._tail.moved(dataset) or self.rebuilt else None
        if rows is not None and self._tail.restarted and known:  # these are all that are left
            self._rebuild(tail=self._tail, behind=self._behind)
        if rows is not None and rows.height:
            # Rows are only added at the end, since sums, counts and places go by position.
            if self._last is not None and self._unit(rows, 0) <= self._last:
                self._rebuild()
                rows = self._read(dataset)
            self._extend(rows)
        if len(changed) and not self.rebuilt:
            places = self._places.find(self.hashes, changed)
            # New rows were judged by these values when they were read.
            places = places[(places >= 0) & (places < known_rows)]
            self.touched = np.unique(self._units_at(places))
            self._judge_again(self.touched, dataset)
            if self.weighing:
                self.weighing.again(self, self.touched, dataset)
        self._is_broken = False
        return self.rebuilt or len(self) > known or len(self.touched) > 0

    def _rebuild(self, *, tail: ChangeFeed | None = None, behind: Behind | None = None) -> None:
        """Forget all rows, but keep their draw counts by name."""
        self.rebuilt = True
        drawn = np.flatnonzero(self.times)
        names = np.concatenate([self.names[drawn], self._ledger[0]])
        times = np.concatenate([self.times[drawn], self._ledger[1]])
        # `unique` keeps the first of equal names: that of the index, which is newer than the ledger
        names, first = np.unique(names, return_index=True)
        self._ledger = names, times[first]
        self._clear()
        self._tail, self._behind = tail or self._tail, behind or self._behind

    def _read(self, dataset: lance.LanceDataset) -> pl.DataFrame:
        """Return the new rows in order, without those that are held back."""
        table = self._tail.read(dataset)
        if self._behind is not None:
            if self._tail.restarted:
                self._behind = Behind(self._order.groups_per_batch or 1)
            table = self._behind.released(table)
        rows = pl.DataFrame(pl.from_arrow(table.select([*self._always, "_rowid"])))
        absent = [n for n in _ORDERED if n not in self._always]
        rows = rows.with_columns(pl.lit(None, pl.Int64).alias(n) for n in absent).with_columns(
            pl.col("batch").fill_null(0),
            # clipped before the cast: versions that other programs stored may not fit
            pl.col("policy_version").fill_null(NO_VERSION).clip(None, NO_VERSION).cast(pl.Int32),
            # as `filters.hashed`: conditions and side values look the rows up by it
            hash=pl.col(self._key).hash(0),
        )
        rows = pl.concat(self._judged(table, rows, dataset))
        rows = rows.sort(self._sorted_by)
        # the rows of a rollout may belong to several groups, which alternate in order of arrival
        if self.grouped and self._order.by_arrival:
            rows = rows.sort(pl.col("_rowid").min().over(self._called), maintain_order=True)
        if self.grouped:
            parts = [pl.col(c).cast(pl.String) for c in self._called]
            # A separator, or batch 1 and group 23 would be named like batch 12 and group 3.
            rows = rows.with_columns(name=pl.concat_str(parts, separator="\x1f").hash(0))
        return rows

    def _judged(
        self, table: pa.Table, rows: pl.DataFrame, dataset: lance.LanceDataset
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows with the columns that say whether they may be drawn, and their priority.

        Texts and lists are read for a bounded number of rows at a time.
        """
        size = _AT_ONCE if self._heavy else max(1, len(table))
        for start in range(0, max(1, len(table)), size):
            part, some = table.slice(start, size), rows.slice(start, size)
            if self._heavy:
                heavy = take(dataset, some["_rowid"].to_list(), self._heavy)
                for name in self._heavy:
                    part = part.append_column(name, heavy.column(name))
            part = self._sides.join(part, some["hash"].to_numpy(), self._judging)
            allowed, gone = self._conditions.allowed(part), self._withdrawn.of(part)
            if gone is not None:
                allowed = allowed & ~gone
                some = some.with_columns(pl.Series("gone", gone))
            some = some.with_columns(pl.Series("allowed", allowed))
            if self.weighing:
                some = some.with_columns(self.weighing.of(part, some).get_columns())
            yield some

    def _judge_again(self, units: np.ndarray, dataset: lance.LanceDataset) -> None:
        """Reevaluate the conditions on rows of these units, whose side columns changed."""
        columns = sorted(self._conditions.columns)
        for start in range(0, len(units) if self._judging else 0, _AT_ONCE):
            some = units[start : start + _AT_ONCE]
            rows = self.rows_of(some)
            facts = take(dataset, self.row_ids[rows].tolist(), columns)
            facts = self._sides.join(facts, self.hashes[rows], self._judging)
            allowed = self._conditions.allowed(facts)
            self.allowed[rows] = allowed if self.gone is None else allowed & ~self.gone[rows]
            if self.grouped:
                before = np.cumsum(self.sizes(some)) - self.sizes(some)
                self.drawable[some] = np.logical_or.reduceat(self.allowed[rows], before)

    @property
    def _called(self) -> list[str]:
        """The columns that identify a unit."""
        return ["batch", "group_id"] if self.grouped else ["batch", self._key]

    @property
    def _sorted_by(self) -> list[str]:
        """The columns that rows are sorted by; addresses increase with each commit."""
        if self._order.by_arrival:
            return ["_rowid"]
        return list(dict.fromkeys([*self._called, self._key]))

    def _unit(self, rows: pl.DataFrame, i: int) -> tuple[object, ...]:
        by = self._sorted_by if self._order.by_arrival else self._called
        return tuple(rows[name][i] for name in by)

    def _extend(self, rows: pl.DataFrame) -> None:
        """Add rows that sort behind all known ones."""
        self._last = self._unit(rows, rows.height - 1)
        first, known = len(self._row_ids), len(self)
        self._row_ids.extend(rows["_rowid"].to_numpy())
        self._hashes.extend(rows["hash"].to_numpy())
        allowed, versions = rows["allowed"].to_numpy(), rows["policy_version"].to_numpy()
        self._allowed.extend(allowed)
        if "gone" in rows.columns:
            self._gone.extend(rows["gone"].to_numpy())
        if self.grouped:
            names = rows["name"].to_numpy()
            cuts = np.flatnonzero(np.append(True, names[1:] != names[:-1]))
            self._names.extend(names[cuts])
            self._starts.extend(first + np.append(cuts[1:], rows.height))
            self.units.drawable.extend(np.logical_or.reduceat(allowed, cuts))
            versions = np.minimum.reduceat(versions, cuts)
        self.units.versions.extend(versions)
        self.units.times.extend(self._times_of(self.names[known:]))
        if self.weighing:
            self.weighing.keep(self, np.arange(known, len(self)), rows)

    def _times_of(self, names: np.ndarray) -> np.ndarray:
        """Return how often units were drawn before they were in the index."""
        known, times = self._ledger
        if not len(known):
            return np.zeros(len(names), np.int32)
        at = np.minimum(np.searchsorted(known, names), len(known) - 1)
        return np.where(known[at] == names, times[at], 0).astype(np.int32)

    # looking up

    def count(self, units: np.ndarray) -> None:
        """Count these units as drawn, once for each time that they are listed."""
        # Not `+=`, which adds 1 to a unit that is listed twice.
        np.add.at(self.times, units, 1)

    def sizes(self, units: np.ndarray) -> np.ndarray:
        """Return the number of rows of each unit."""
        if not self.grouped:
            return np.ones(len(units), np.int64)
        return self.starts[units + 1] - self.starts[units]

    def rows_of(self, units: np.ndarray) -> np.ndarray:
        """Return the places of all rows of the given units, unit by unit."""
        if not self.grouped:
            return units
        sizes = self.sizes(units)
        before = np.cumsum(sizes) - sizes
        return np.arange(int(sizes.sum())) + np.repeat(self.starts[units] - before, sizes)

    def _units_at(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, rows, side="right") - 1 if self.grouped else rows

    def unit_of(self, ids: Sequence[str]) -> np.ndarray:
        """Return the unit that holds each of these rows, -1 where there is none."""
        hashes = hashed(pl.Series(ids, dtype=pl.String))
        places = self._places.find(self.hashes, hashes)
        return np.where(places >= 0, self._units_at(places), -1)

    def find(self, ids: Sequence[str]) -> np.ndarray:
        """Return the units that hold these rows, in their order.

        A row that is listed k times stands for k draws of its unit. Ids that are not in
        the index are passed over.
        """
        units = self.unit_of(ids)
        there = units >= 0
        nth = repeats(hashed(pl.Series(ids, dtype=pl.String))[there])
        units = units[there]
        key = units * (int(nth.max(initial=0)) + 1) + nth
        return units[np.sort(np.unique(key, return_index=True)[1])]


assert set(_ORDERED) <= set(TABLES["experiences"].names), "the index reads declared columns"
