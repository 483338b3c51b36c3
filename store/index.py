"""The light index of rows that may be drawn: a few numbers a row, fed from new versions only."""

from collections.abc import Sequence

import duckdb
import lance
import numpy as np
import polars as pl
import pyarrow as pa

from .errors import QueryError
from .query import Console, columns_of, query_error
from .schema import TABLES
from .store import Store
from .tail import Tail

_ALWAYS = ("experience_id", "group_id", "step", "policy_version", "drop_reason")
NO_VERSION = np.iinfo(np.int64).max
"""Stands for a row that no policy of ours wrote: it is never stale."""


class Index:
    """Rows of `experiences` in one canonical order, cut into units: single rows, or whole groups.

    The order is by step, group and id, so that the same rows give the same index on any machine
    and however they arrived. A unit may be drawn when any of its rows may.
    """

    def __init__(
        self, store: Store, *, grouped: bool, where: str | None = None, run_id: str | None = None
    ) -> None:
        self._store, self._grouped, self._where = store, grouped, where
        self._filter = f"run_id = '{run_id}'" if run_id else None
        self._columns = sorted({*_ALWAYS, *(columns_of(where) if where else ())})
        self._console: Console | None = None
        self.rebuilt = False
        self._clear()

    def _clear(self) -> None:
        self._tail = Tail(self._columns, where=self._filter)
        self._last: tuple[object, ...] | None = None
        self.row_ids = np.empty(0, np.uint64)
        self.hashes = np.empty(0, np.uint64)
        self.allowed = np.empty(0, np.bool_)
        self.starts = np.zeros(1, np.int64)
        """Unit u is rows starts[u] to starts[u + 1]."""
        self.versions = np.empty(0, np.int64)
        """Oldest policy version of each unit, NO_VERSION where none of its rows has one."""

    def __len__(self) -> int:
        return len(self.versions)

    def refresh(self) -> bool:
        """Read what was stored since the last call; tell whether there was anything.

        Rows that sort before known ones (a late group, a second import) make it read all again:
        then places of units change, and `rebuilt` says so.
        """
        self.rebuilt = False
        dataset = self._store.dataset("experiences")
        if not self._tail.moved(dataset):
            return False
        rows = self._read(dataset)
        if rows.height and self._last is not None and self._key(rows, 0) <= self._last:
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
        allowed = self._allowed(table)
        rows = pl.DataFrame(pl.from_arrow(table.select([*_ALWAYS, "_rowid"])))
        rows = rows.with_columns(pl.Series("allowed", allowed), pl.col("step").fill_null(0))
        return rows.sort(self._order)

    @property
    def _order(self) -> list[str]:
        return ["step", "group_id", "experience_id"] if self._grouped else ["step", "experience_id"]

    def _key(self, rows: pl.DataFrame, i: int) -> tuple[object, ...]:
        return tuple(rows.select(self._order).row(i))

    def _allowed(self, table: pa.Table) -> np.ndarray:
        """Tell which rows may be drawn: not dropped, and `where` is true."""
        kept = table.column("drop_reason").is_null().to_numpy()
        if self._where is None or not len(table):
            return kept
        if self._console is None:
            self._console = Console(views=False)
        others = {n: v for n, v in self._store.versions().items() if n != "experiences"}
        self._console.show(others, self._store.open_at)
        self._console.put("experiences", table)
        query = f"SELECT coalesce(({self._where}\n), false) AS allowed FROM experiences"
        try:
            column = self._console.sql(query).to_arrow_table().column(0)
        except duckdb.Error as error:
            raise query_error(error, f"`where` {self._where!r}") from error
        if not pa.types.is_boolean(column.type):
            raise QueryError(
                f"`where` must be true or false, got {column.type} from {self._where!r}"
            )
        return kept & column.to_numpy(zero_copy_only=False)

    def _extend(self, rows: pl.DataFrame) -> None:
        self._last = self._key(rows, rows.height - 1)
        first = len(self.row_ids)
        versions = rows["policy_version"].fill_null(NO_VERSION).to_numpy().astype(np.int64)
        self.row_ids = np.concatenate([self.row_ids, rows["_rowid"].to_numpy().astype(np.uint64)])
        self.hashes = np.concatenate([self.hashes, _hash(rows["experience_id"])])
        self.allowed = np.concatenate([self.allowed, rows["allowed"].to_numpy().astype(np.bool_)])
        cuts = self._cuts(rows)
        self.starts = np.concatenate([self.starts, first + np.append(cuts[1:], rows.height)])
        self.versions = np.concatenate([self.versions, np.minimum.reduceat(versions, cuts)])

    def _cuts(self, rows: pl.DataFrame) -> np.ndarray:
        """Return where each unit of `rows` begins."""
        if not self._grouped:
            return np.arange(rows.height)
        starts = rows["group_id"].ne_missing(rows["group_id"].shift(1)).to_numpy().copy()
        starts[0] = True
        return np.flatnonzero(starts)

    @property
    def drawable(self) -> np.ndarray:
        """Whether each unit has a row that may be drawn."""
        return np.logical_or.reduceat(self.allowed, self.starts[:-1]) if len(self) else self.allowed


def _hash(ids: pl.Series) -> np.ndarray:
    return ids.hash(0).to_numpy().astype(np.uint64)


assert set(_ALWAYS) <= set(TABLES["experiences"].names), "the index reads declared columns"
