"""Conditions on the rows that may be drawn: an SQL condition on a row, or a query for ids."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import duckdb
import lance
import numpy as np
import polars as pl
import pyarrow as pa

from ..changes import CREATED
from ..errors import QueryError, StoreError
from ..query import QuerySession, names_in, nodes, query_error, syntax, tables_of
from ..schema import TABLES
from ..side_columns import SideColumn, from_sql
from ..store import Store

_PLACE = "place_of_the_row"
_HEAVY = (pa.types.is_list, pa.types.is_large_list)


class Conditions:
    """Decides which rows may be drawn, following the tables that the conditions read."""

    def __init__(
        self,
        store: Store,
        *,
        where: str | None,
        query: str | None,
        until: Mapping[str, int] | None,
        table: str = "experiences",
        sides: Sequence[SideColumn] = (),
    ) -> None:
        """Raise QueryError for an invalid `where` or `query`, before there are rows.

        Both see the side columns `sides` in place of stored columns of `experiences`.
        """
        self._store, self._where, self._query, self._until = store, where or None, query, until
        self._table, self._key = table, TABLES[table].key[0]
        known, names = set(TABLES[table].names), {n.lower() for n in names_in(where or "true")}
        own = sides if table == "experiences" else ()
        self.sides = [side for side in own if side.alias.lower() in names]
        """The side columns that `where` reads of a row."""
        self._hidden = {side.alias for side in own}
        self.columns = ({"drop_reason"} & known) | ((names & known) - self._hidden)
        """What else `allowed` reads of a row."""
        asked = tables_of(where) if where else set()
        in_all = asked | (_tables_in(query) if query is not None else set())
        reads_sides = bool(sides) and "experiences" in in_all
        self._tables = sorted(in_all.union(*(s.tables for s in sides if reads_sides)))
        self.versions: dict[str, int] = {}
        """The versions of the tables that the conditions read."""
        self._open_at = store.open_at if until is None else _opener(store, until)
        self._instead = (
            {"experiences": from_sql(sides, plain="plain_experiences")} if reads_sides else {}
        )
        self._console = QuerySession(views=False) if where and not self._instead else None
        self._asking: QuerySession | None = None
        self._chosen: np.ndarray | None = None
        self._check()

    def follow(self) -> bool:
        """Read the versions of these tables; return whether any changed since the last call."""
        versions = {name: self._version(name) for name in self._tables}
        if versions == self.versions and (self._query is None or self._chosen is not None):
            return False
        first = not self.versions
        if self._query is not None:
            self._chosen = self._ids(self._query, versions)
        # Only now: after a query that failed, the next call must ask again.
        self.versions = versions
        return not first

    def allowed(self, rows: pa.Table) -> np.ndarray:
        """Return which rows may be drawn: not dropped, chosen by the query, and `where` is true.

        The rows have `columns` and `sides`.
        """
        kept = np.ones(len(rows), np.bool_)
        if "drop_reason" in self.columns:
            kept = rows.column("drop_reason").is_null().to_numpy()
        if self._chosen is not None:
            hashes = hashed(pl.Series(values=rows.column(self._key), dtype=pl.String))
            kept = kept & np.isin(hashes, self._chosen)
        if self._where is None or not len(rows):
            return kept
        # a subquery is a join, which may return the rows in any order
        placed = rows.append_column(_PLACE, pa.array(np.arange(len(rows))))
        # The line break ends a `--` comment; NULL does not match, as in a WHERE clause.
        query = f"SELECT coalesce(({self._where}\n), false) FROM new_rows AS {self._table}"
        console, what = self._console_with(placed), f"`where` {self._where!r}"
        try:
            found = console.sql(f"{query} ORDER BY {_PLACE}", what=what).to_arrow_table()
        except duckdb.Error as error:
            raise query_error(error, what) from error
        return kept & found.column(0).to_numpy(zero_copy_only=False)

    def _version(self, name: str) -> int:
        if self._until is not None and name in self._until:
            return self._until[name]
        return self._store.dataset(name).version

    def _check(self) -> None:
        if self._query is not None:
            self._check_query(self._query)
        if self._where is None:
            return
        tree = syntax(f"SELECT ({self._where}\n)", what=f"`where` {self._where!r}")
        check_steady(tree, what=f"`where` {self._where!r}")
        fields = [f for f in TABLES[self._table].schema if f.name not in self._hidden]
        kinds = [pa.string() if side.is_text else pa.float64() for side in self.sides]
        fields += [pa.field(s.alias, kind) for s, kind in zip(self.sides, kinds, strict=True)]
        empty = pa.schema(fields).empty_table()
        self._console_with(empty).check_condition(self._where, f"new_rows AS {self._table}")

    def _console_with(self, rows: pa.Table) -> QuerySession:
        """Return a console with these rows and the tables that `where` looks into."""
        versions = self.versions or {name: self._version(name) for name in self._tables}
        console = self._console or self._console_of_all(versions)
        console.put("new_rows", rows)
        if console is self._console:
            console.show(versions, self._open_at)
        return console

    def _check_query(self, query: str) -> None:
        check_steady(syntax(query, what=_what(query)), what=_what(query))
        columns = self._console_of_all({}).sql(query, what=_what(query)).columns
        if self._key not in columns:
            given = ", ".join(f"`{c}`" for c in columns)
            raise QueryError(
                f"{_what(query)} must give the column `{self._key}` of the rows to draw, got "
                f"{given}"
            )

    def _console_of_all(self, versions: Mapping[str, int]) -> QuerySession:
        """Return the console with all tables and views, of these versions where one is named."""
        if self._asking is None:
            self._asking = QuerySession(instead=self._instead)
        others = {name: self._version(name) for name in TABLES if name not in versions}
        self._asking.show({**others, **versions}, self._open_at)
        return self._asking

    def _ids(self, query: str, versions: Mapping[str, int]) -> np.ndarray:
        """Return the hashes of the ids that the query gives; all must be stored."""
        console, inner = self._console_of_all(versions), query.strip().rstrip(";")
        try:
            unknown = console.sql(
                f"SELECT count(*), min({self._key}) FROM ({inner}\n) AS chosen ANTI JOIN "
                f"{self._table} USING ({self._key})",
                what=_what(query),
            ).fetchall()[0]
            ids = console.sql(
                f"SELECT DISTINCT {self._key} FROM ({inner}\n)", what=_what(query)
            ).pl()
        except duckdb.Error as error:
            raise query_error(error, _what(query)) from error
        if unknown[0]:
            such = f", such as `{unknown[1]}`" if unknown[1] is not None else ""
            raise QueryError(
                f"{_what(query)} gives {unknown[0]} ids of {self._table} that are not in the "
                f"store{such}; draw from stored rows only"
            )
        return np.sort(hashed(ids[self._key].cast(pl.String)))


def check_steady(tree: object, *, what: str) -> None:
    """Raise QueryError for a function that is not deterministic: such a draw cannot be repeated."""
    calls = [node for node in nodes(tree) if node.get("function_name")]
    called = {str(node["function_name"]) for node in calls}
    # `age` of two times is steady, and of one it is the time until today
    if any(c["function_name"] == "age" and len(c.get("arguments", ())) == 1 for c in calls):
        raise QueryError(
            f"{what} calls `age` of one time, which gives another value each day: such a draw "
            "could not be repeated; give it two times"
        )
    for name in sorted(called & _unsteady()):
        raise QueryError(
            f"{what} calls `{name}`, which gives another value each time: such a draw could not "
            "be repeated"
        )


@cache
def _unsteady() -> frozenset[str]:
    """Return the functions of SQL whose value may change from call to call."""
    query = (  # of `+` and its like, what takes a time with time zone depends on the session's
        "SELECT function_name FROM duckdb_functions() WHERE stability IS NOT NULL "
        "GROUP BY ALL HAVING bool_and(stability <> 'CONSISTENT')"
    )
    with duckdb.connect(":memory:") as con:
        return frozenset(name for (name,) in con.execute(query).fetchall())


def hashed(ids: pl.Series) -> np.ndarray:
    """Return 64-bit hashes of ids; they identify rows, and never order them."""
    # never stored: Polars promises equal hashes within one of its versions
    return ids.hash(0).to_numpy().astype(np.uint64, copy=False)


def _what(query: str) -> str:
    return f"`query` {query!r}"


def _tables_in(query: str) -> set[str]:
    """Return the tables that a query reads; a view may read all."""
    named = {str(node["table_name"]) for node in nodes(syntax(query, what=_what(query)))
             if node.get("table_name")}  # fmt: skip
    return named if named <= set(TABLES) else set(TABLES)


def _opener(
    store: Store, until: Mapping[str, int]
) -> Callable[[str, int], lance.LanceDataset | pa.Table]:
    """Return a function that opens a past version of a table, even one that was cleaned up.

    In that case its rows are read from the newest version, without list columns.
    """

    def open_at(name: str, version: int) -> lance.LanceDataset | pa.Table:
        try:
            return store.open_at(name, version)
        except StoreError:
            if name not in until:
                raise
        dataset = store.open_at(name)
        light = [f.name for f in dataset.schema if not any(is_(f.type) for is_ in _HEAVY)]
        return dataset.to_table(columns=light, filter=f"{CREATED} <= {version}")

    return open_at
