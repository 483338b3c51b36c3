"""Writing to a table: each part is one commit, and rows that are there already are left out."""

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

_TRIES = 8
"""How often rows are compared with a table to which other runs write."""


@dataclass(frozen=True)
class Maker:
    """Who writes: a run of a pipeline."""

    pipeline: str
    lineage_id: str
    is_replacing: bool = False
    """Whether what stands afterwards is what it gives."""


class Appending:
    """Appends to a table, a part in one commit; rows say which run added them.

    Those that were stored before become its own too, unless a run of its name that counts gave
    them: then they are its pipeline's already.
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
        """Count rows that are there already, by what `members` calls them."""
        self._already += len(ids)
        self._there.append(ids)

    def done(self) -> Appended:
        """Return what was appended by all parts together."""
        if self._there and self._table not in VALUES:
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
        """Nothing is open: what was appended is stored."""


def _given_before(store: Store, table: str, maker: Maker) -> pl.Series:
    """Return the rows that runs of the same pipeline gave, and that count."""
    found: Any = store.sql(
        f"SELECT row_id FROM makers WHERE table_name = {literal(table)} AND is_current "
        f"AND name = {literal(maker.pipeline)}"
    ).pl()
    return found["row_id"]


class Comparing(Appending):
    """Appends what is new beside what the table holds, also when another writes it meanwhile."""

    def add(self, rows: pl.DataFrame) -> None:
        """Append what is new of rows; raises ConflictError when others always come before."""
        for tried in range(1, _TRIES + 1):
            new = self.new(rows)
            try:
                self.append(new)
            except ConflictError:
                if tried == _TRIES:
                    raise
                self.learn()
            else:
                self.leave(rows, new)
                return

    def new(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return what the table does not hold, as rows of it."""
        raise NotImplementedError

    def learn(self) -> None:
        """Read what the table holds."""
        raise NotImplementedError

    def leave(self, rows: pl.DataFrame, new: pl.DataFrame) -> None:
        """Count the rows that the table holds already."""
        raise NotImplementedError


class Pairs(Comparing):
    """Appends pairs that nobody stored yet: two rows are one pair, whoever says so.

    A pair that another stored becomes its own too, so that training on all pairs has it once.
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
        self._known.update(rows["preference_id"])

    def new(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the pairs that nobody stored."""
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
