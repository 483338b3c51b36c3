"""Writing to a table: each part is one commit, and rows that are there already are left out."""

from collections.abc import Callable

import polars as pl

from ...store import Appended, Store
from ...store.errors import ConflictError
from ...store.validate import Rows
from ..source import rows_of

_TRIES = 8
"""How often rows are compared with a table to which other runs write."""


class Appending:
    """Appends to a table, a part in one commit."""

    def __init__(self, store: Store, table: str, form: Callable[[pl.DataFrame], Rows]) -> None:
        self._store, self._table, self._form = store, table, form
        self._rows = self._already = self._version = 0

    def put(self, rows: pl.DataFrame) -> None:
        """Append a part."""
        self.append(self._form(rows))

    def append(self, rows: Rows) -> None:
        """Append rows of the table."""
        done = self._store.append(self._table, rows)
        self._rows += done.rows
        self._already += done.already
        self._version = done.version

    def skip(self, rows: int) -> None:
        """Count rows that are there already."""
        self._already += rows

    def done(self) -> Appended:
        """Return what was appended by all parts together."""
        version = self._version or self._store.versions()[self._table]
        return Appended(self._rows, self._already, version)

    def close(self) -> None:
        """Nothing is open: what was appended is stored."""


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
                self.skip(rows.height - new.height)
                return

    def new(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return what the table does not hold, as rows of it."""
        raise NotImplementedError

    def learn(self) -> None:
        """Read what the table holds."""
        raise NotImplementedError


class Pairs(Comparing):
    """Appends pairs that nobody stored yet: two rows are one pair, whoever says so."""

    def __init__(self, store: Store, pipeline: str) -> None:
        super().__init__(store, "preferences", lambda rows: rows)
        self._source = f"pipeline {pipeline}"
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
