"""The light index of rows that may be drawn: a few numbers a row, fed from new versions only."""

from collections.abc import Sequence

import duckdb
import lance
import numpy as np
import polars as pl
import pyarrow as pa

from .errors import QueryError
from .query import Console, columns_of, query_error, tables_of
from .schema import TABLES
from .store import Store
from .tail import Tail

_ALWAYS = ("experience_id", "group_id", "step", "policy_version", "drop_reason")
_KEPT = ("_rowid", "hash", "name", "allowed", "policy_version")
NO_VERSION = int(np.iinfo(np.int64).max)
"""Stands for a row that no policy of ours wrote: it is never stale."""


class Index:
    """Rows of `experiences` in one canonical order, cut into units: single rows, or whole groups.

    The order is by step, group and id, so that the same rows give the same index on any machine
    and however they arrived. A unit may be drawn when any of its rows may. `where` may look into
    other tables; what it says of a row then follows them.
    """

    def __init__(
        self, store: Store, *, grouped: bool, where: str | None = None, run_id: str | None = None
    ) -> None:
        self._store, self._grouped, self._where = store, grouped, where or None
        self._run_id = run_id
        self._columns = sorted({*_ALWAYS, *(columns_of(where) if where else ())})
        self._others = sorted(tables_of(where)) if where else []
        self._seen: dict[str, int] = {}
        self._console = Console(views=False) if where else None
        self.rebuilt = False
        self._clear()
        self._check()

    def _clear(self) -> None:
        self._tail = Tail(self._columns, run_id=self._run_id)
        self._last: tuple[object, ...] | None = None
        self.row_ids = np.empty(0, np.uint64)
        self.hashes = np.empty(0, np.uint64)
        self.allowed = np.empty(0, np.bool_)
        self.starts = np.zeros(1, np.int64)
        """Unit u is rows starts[u] to starts[u + 1]."""
        self.names = np.empty(0, np.uint64)
        """A hash of what each unit is called."""
        self.versions = np.empty(0, np.int64)
        """Oldest policy version of each unit, NO_VERSION where none of its rows has one."""

    def __len__(self) -> int:
        return len(self.versions)

    def refresh(self) -> bool:
        """Read what was stored since the last call; tell whether there was anything.

        Rows that sort before known ones (a late group, a second import) make it read all again, as
        do rows of a known group, and new rows in tables that `where` looks into: then places of
        units change, and `rebuilt` says so.
        """
        self.rebuilt = False
        dataset = self._store.dataset("experiences")
        seen = {name: self._store.dataset(name).version for name in self._others}
        if not self._tail.moved(dataset) and seen == self._seen:
            return False
        if seen != self._seen:
            self._seen = seen
            self._clear()
            self.rebuilt = True
        rows = self._read(dataset)
        if rows.height and self._last is not None and self._unit(rows, 0) <= self._last:
            self._clear()
            self.rebuilt = True
            rows = self._read(dataset)
        if rows.height:
            self._extend(rows)
        return rows.height > 0

    def rows_of(self, units: np.ndarray) -> np.ndarray:
        """Return the places of all rows of the given units, unit by unit."""
        spans = [np.arange(int(self.starts[u]), int(self.starts[u + 1])) for u in units]
        return np.concatenate(spans) if spans else np.empty(0, np.int64)

    def find(self, experience_ids: Sequence[str]) -> np.ndarray:
        """Return the units that hold these experiences, in their order, each once.

        Ids that are not in the index are passed over.
        """
        order = np.argsort(self.hashes, kind="stable")
        wanted = _hash(pl.Series(experience_ids, dtype=pl.String))
        at = np.searchsorted(self.hashes[order], wanted)
        at = np.minimum(at, max(len(order) - 1, 0))
        hits = order[at][self.hashes[order][at] == wanted] if len(order) else np.empty(0, np.int64)
        units = np.searchsorted(self.starts, hits, side="right") - 1
        return units[np.sort(np.unique(units, return_index=True)[1])] if len(units) else units

    def _read(self, dataset: lance.LanceDataset) -> pl.DataFrame:
        table = self._tail.read(dataset)
        allowed = pl.Series("allowed", self._allowed(table))
        rows = pl.LazyFrame(pl.from_arrow(table.select([*_ALWAYS, "_rowid"])))
        called = pl.concat_str([pl.col(c).cast(pl.String) for c in self._called], separator="\x1f")
        return (
            rows.with_columns(allowed, pl.col("step").fill_null(0))
            .sort([*dict.fromkeys([*self._called, "experience_id"])])
            .with_columns(
                pl.col("experience_id").hash(0).alias("hash"),
                called.hash(0).alias("name"),
                pl.col("policy_version").fill_null(NO_VERSION),
            )
            .collect()
        )

    @property
    def _called(self) -> list[str]:
        """The columns that tell units apart."""
        return ["step", "group_id"] if self._grouped else ["step", "experience_id"]

    def _unit(self, rows: pl.DataFrame, i: int) -> tuple[object, ...]:
        return tuple(rows[name][i] for name in self._called)

    def _check(self) -> None:
        """Raise QueryError for a `where` that is no condition on a row, before there are rows."""
        if self._console is None:
            return
        empty = TABLES["experiences"].schema.empty_table()
        found = self._ask(empty, f"SELECT ({self._where}\n) FROM new_rows AS experiences")
        kind = found.column(0).type
        if not pa.types.is_boolean(kind):
            raise QueryError(f"`where` must be true or false, got {kind} from {self._where!r}")
        # as a column it might count or rank the rows that happen to arrive together
        self._ask(empty, f"SELECT 1 FROM new_rows AS experiences WHERE ({self._where}\n)")

    def _allowed(self, table: pa.Table) -> np.ndarray:
        """Tell which rows may be drawn: not dropped, and `where` is true."""
        kept = table.column("drop_reason").is_null().to_numpy()
        if self._where is None or not len(table):
            return kept
        query = f"SELECT coalesce(({self._where}\n), false) FROM new_rows AS experiences"
        return kept & self._ask(table, query).column(0).to_numpy(zero_copy_only=False)

    def _ask(self, rows: pa.Table, query: str) -> pa.Table:
        """Run a query over these rows and the tables that `where` looks into."""
        assert self._console is not None, "there is a console when there is a `where`"
        self._console.put("new_rows", rows)
        versions = self._seen or {name: self._store.dataset(name).version for name in self._others}
        self._console.show(versions, self._store.open_at)
        what = f"`where` {self._where!r}"
        try:
            return self._console.sql(query, what=what).to_arrow_table()
        except duckdb.Error as error:
            raise query_error(error, what) from error

    def _extend(self, rows: pl.DataFrame) -> None:
        self._last = self._unit(rows, rows.height - 1)
        first = len(self.row_ids)
        arrays = {name: rows[name].to_numpy() for name in _KEPT}
        names = arrays["name"]
        cuts = np.flatnonzero(np.append(True, names[1:] != names[:-1]))
        oldest = np.minimum.reduceat(arrays["policy_version"], cuts)
        self.row_ids = np.concatenate([self.row_ids, arrays["_rowid"]])
        self.hashes = np.concatenate([self.hashes, arrays["hash"]])
        self.allowed = np.concatenate([self.allowed, arrays["allowed"]])
        self.starts = np.concatenate([self.starts, first + np.append(cuts[1:], rows.height)])
        self.names = np.concatenate([self.names, names[cuts]])
        self.versions = np.concatenate([self.versions, oldest])

    @property
    def drawable(self) -> np.ndarray:
        """Whether each unit has a row that may be drawn."""
        return np.logical_or.reduceat(self.allowed, self.starts[:-1]) if len(self) else self.allowed


def _hash(ids: pl.Series) -> np.ndarray:
    return ids.hash(0).to_numpy().astype(np.uint64)


assert set(_ALWAYS) <= set(TABLES["experiences"].names), "the index reads declared columns"
