"""Rows that were taken back: no new draw contains them, and earlier draws are unchanged."""

from collections.abc import Mapping

import numpy as np
import polars as pl
import pyarrow as pa

from ..changes import ChangeFeed
from ..query import is_in
from ..schema import TABLES
from ..store import Store
from ..withdrawals import is_gone, kept, taken_back

_READ = {
    "withdrawals": ("lineage_id", "is_withdrawn", "created_at"),
    "members": ("lineage_id", "table_name", "row_id"),
}
_REFERS = {"preferences": ("chosen_id", "rejected_id")}
"""Columns that name experiences: a pair with one that was taken back is not drawn either."""
_NONE = pl.Series([], dtype=pl.String)


class Withdrawn:
    """Follows `withdrawals` and `members`, like the view `experiences_current`."""

    def __init__(self, store: Store, *, table: str, until: Mapping[str, int] | None) -> None:
        self._store, self._table = store, table
        # `until` lacks these tables if nothing had been taken back when the step was drawn
        self._tails = {
            name: ChangeFeed(columns, until=None if until is None else until.get(name, 1))
            for name, columns in _READ.items()
        }
        self._rows: dict[str, pl.DataFrame] = {}
        self._gone: list[str] = []
        self._kept = self._experiences = _NONE
        self.follow()

    @property
    def columns(self) -> set[str]:
        """The columns that `of` reads; none while nothing is taken back."""
        read = {"lineage_id", *TABLES[self._table].key, *_REFERS.get(self._table, ())}
        return read if self._gone else set()

    @property
    def versions(self) -> dict[str, int]:
        """The versions of the tables that have rows."""
        return {name: tail.version for name, tail in self._tails.items() if tail.version > 1}

    def follow(self) -> bool:
        """Read the tables; return whether the set of rows that count has changed."""
        is_new = self._read("withdrawals")
        if self._rows["withdrawals"].height:  # else members say nothing
            is_new = self._read("members") or is_new
        if not is_new:
            return False
        before = self._gone, self._kept
        self._gone = taken_back(self._rows["withdrawals"])
        # Sorted, because they are compared as sets below.
        self._kept = kept(self._rows["members"], self._table, self._gone).unique().sort()
        if self._table in _REFERS:
            self._experiences = self._gone_experiences()
        return self._gone != before[0] or not self._kept.equals(before[1])

    def of(self, rows: pa.Table) -> np.ndarray | None:
        """Return which rows were taken back; None: none of any."""
        if not self._gone:
            return None
        message = is_gone(self._table, self._gone, self._kept)
        for name in _REFERS.get(self._table, ()):
            message |= pl.col(name).is_in(self._experiences.implode())
        frame = pl.DataFrame(pl.from_arrow(rows.select(sorted(self.columns))))
        return frame.select(gone=message)["gone"].to_numpy()

    def _read(self, name: str) -> bool:
        dataset, tail = self._store.dataset(name), self._tails[name]
        if not tail.moved(dataset):
            return False
        rows = pl.DataFrame(pl.from_arrow(tail.read(dataset))).drop("_rowid")
        known = self._rows.get(name)
        self._rows[name] = rows if known is None or tail.restarted else known.vstack(rows)
        return rows.height > 0 or tail.restarted

    def _gone_experiences(self) -> pl.Series:
        if not self._gone:
            return _NONE
        found = self._store.dataset("experiences").to_table(
            columns=["experience_id"], filter=is_in("lineage_id", self._gone)
        )
        ids = pl.Series(values=found.column("experience_id"), dtype=pl.String)
        both = kept(self._rows["members"], "experiences", self._gone)
        return ids.filter(~ids.is_in(both.implode()))
