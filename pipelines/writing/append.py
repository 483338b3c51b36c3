"""Write to a table: each part is one commit, and rows that are stored already are left out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl

from ...store import Appended, Store
from ...store.errors import ConflictError
from ...store.query import literal
from ...store.undo import also_gave
from ...store.withdrawals import row_id
from ..sink import VALUES
from ..source import rows_of

_ATTEMPTS = 8
"""Attempts to append to a table to which other runs write at the same time."""


@dataclass(frozen=True)
class Maker:
    """The pipeline run that writes."""

    pipeline: str
    lineage_id: str
    is_replacing: bool = False
    """Whether its rows replace those of earlier runs."""


class Appending:
    """Appends to a table, one commit a part, with the run's id in each row.

    Rows that were stored already also become rows of this run, unless an earlier run of the same
    pipeline wrote them, so that undoing another run does not remove them.
    """

    def __init__(
        self, store: Store, table: str, maker: Maker, form: Callable[[pl.DataFrame], pl.DataFrame]
    ) -> None:
        self._store, self._table, self._maker, self._form = store, table, maker, form
        self._rows = self._already = self._version = 0
        self._there: list[pl.Series] = []

    def put(self, rows: pl.DataFrame) -> None:
        """Append a part."""
        self.append(self._form(rows))

    def append(self, rows: pl.DataFrame) -> None:
        """Append rows of the table."""
        rows = rows.with_columns(lineage_id=pl.lit(self._maker.lineage_id, pl.String))
        done = self._store.append(self._table, rows)
        if done.duplicates:
            self._there.append(rows.select(row_id(self._table)).to_series())
        self._rows += done.rows
        self._already += done.duplicates
        self._version = done.version

    def skip(self, ids: pl.Series) -> None:
        """Count rows that are stored already, given their ids in the table `members`."""
        self._already += len(ids)
        self._there.append(ids)

    def done(self) -> Appended:
        """Return the totals of all parts."""
        if self._there and self._table not in VALUES:
            # else undoing the other run would remove rows that this one gave too
            ids = pl.concat(self._there)
            known = _given_before(self._store, self._table, self._maker)
            also_gave(
                self._store,
                self._maker.lineage_id,
                self._table,
                ids if self._maker.is_replacing else ids.filter(~ids.is_in(known.implode())),
            )
        version = self._version or self._store.versions()[self._table]
        return Appended(self._rows, self._already, version)

    def close(self) -> None:
        """Do nothing: appended rows are stored."""


def _given_before(store: Store, table: str, maker: Maker) -> pl.Series:
    """Return the ids of rows that earlier runs of the pipeline wrote and that were not undone."""
    found: Any = store.sql(
        f"SELECT row_id FROM makers WHERE table_name = {literal(table)} AND is_current "
        f"AND name = {literal(maker.pipeline)}"
    ).pl()
    return found["row_id"]


class Comparing(Appending):
    """Appends rows that the table does not have, also while others write to it."""

    def add(self, rows: pl.DataFrame) -> None:
        """Append new rows; raises ConflictError if other writers win every attempt."""
        for attempt in range(1, _ATTEMPTS + 1):
            new = self.new(rows)
            try:
                self.append(new)
            except ConflictError:
                # another run stored some of these rows after they were compared
                if attempt == _ATTEMPTS:
                    raise
                self.learn()
            else:
                return self.leave(rows, new)

    def new(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows that the table does not have."""
        raise NotImplementedError

    def learn(self) -> None:
        """Read which rows the table has."""
        raise NotImplementedError

    def leave(self, rows: pl.DataFrame, new: pl.DataFrame) -> None:
        """Count the rows that the table has already."""
        raise NotImplementedError


class Pairs(Comparing):
    """Appends pairs that are not stored yet; two rows form one pair, whichever pipeline found it.

    A pair that another pipeline stored also becomes a pair of this run, so it is trained on once.
    """

    def __init__(self, store: Store, maker: Maker) -> None:
        super().__init__(store, "preferences", maker, lambda rows: rows)
        self._source = f"pipeline {maker.pipeline}"
        self.learn()

    def put(self, rows: pl.DataFrame) -> None:
        """Append a part."""
        if "source" not in rows.columns:
            rows = rows.with_columns(pl.lit(self._source).alias("source"))
        self.add(rows)
        # also those that were left out: they are stored now, whoever stored them
        self._known.update(rows["preference_id"])

    def new(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the pairs that are not stored."""
        is_new = [i not in self._known for i in rows["preference_id"]]
        return rows.filter(pl.lit(pl.Series(is_new, dtype=pl.Boolean)))

    def learn(self) -> None:
        """Read the ids of all pairs."""
        found = rows_of(self._store.sql("SELECT preference_id FROM preferences"))
        self._known = set(found["preference_id"])

    def leave(self, rows: pl.DataFrame, new: pl.DataFrame) -> None:
        """Count the pairs that are stored already."""
        ids = rows["preference_id"].alias("row_id")
        self.skip(ids.filter(~ids.is_in(new["preference_id"].implode())))
