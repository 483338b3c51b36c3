"""SQL over the store: a DuckDB session that sees all tables and views, and can only read."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files

import duckdb
import lance
import pyarrow as pa

from .errors import QueryError, nearest
from .schema import TABLES

_READS = {"SELECT", "EXPLAIN"}
_LONGEST = 200
_SETTINGS = "SET enable_external_access = false; SET lock_configuration = true"


class Console:
    """One DuckDB session over given versions of the tables. Not to be shared between threads."""

    def __init__(self, *, views: bool = True) -> None:
        self._con = duckdb.connect(":memory:")
        self._versions: dict[str, int] = {}
        self._views = views

    def show(
        self, versions: Mapping[str, int], open_at: Callable[[str, int], lance.LanceDataset]
    ) -> None:
        """Let the table names mean these versions; only tables that moved are opened again."""
        first = not self._versions
        for name, version in versions.items():
            if self._versions.get(name) != version:
                self._con.register(name, open_at(name, version))
        self._versions = dict(versions)
        if first and self._views:
            self._con.execute(files(__package__ or "").joinpath("views.sql").read_text())
        if first:
            self._con.execute(_SETTINGS)

    def put(self, name: str, rows: pa.Table) -> None:
        """Let a name mean rows in memory."""
        self._con.register(name, rows)

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """Return the relation of one SELECT; all that is not a single read raises QueryError."""
        try:
            statements = self._con.extract_statements(query)
        except duckdb.Error as error:
            raise query_error(error) from error
        kinds = [s.type.name for s in statements]
        if len(kinds) != 1 or kinds[0] not in _READS:
            got = " then ".join(kinds) or "nothing"
            raise QueryError(
                f"the store is read with one SELECT, got {got}; "
                "rows are added with `append`, `rlake import` or a pipeline"
            )
        try:
            relation = self._con.sql(query)
        except duckdb.Error as error:
            raise query_error(error) from error
        assert relation is not None, "a SELECT always has a relation"
        return relation


def columns_of(condition: str) -> set[str]:
    """Return the columns that an SQL condition reads.

    >>> sorted(columns_of("reward > 0.5 AND len(response_text) < 100"))
    ['response_text', 'reward']

    Raises QueryError when it does not parse as one condition.
    """
    with duckdb.connect(":memory:") as con:
        query = f"SELECT 1 FROM experiences WHERE ({condition}\n)"
        try:
            statements = con.extract_statements(query)
            if len(statements) != 1:
                raise QueryError(f"`where` must be one condition, got {condition!r}")
            row = con.execute("SELECT json_serialize_sql(?)", [query]).fetchone()
        except duckdb.Error as error:
            raise query_error(error, f"`where` {condition!r}") from error
    assert row is not None, "json_serialize_sql returns one row"
    return {name for name in _names(json.loads(row[0])) if name in TABLES["experiences"].names}


def _names(node: object) -> Iterator[str]:
    """Walk a parsed query for every name that may be a column."""
    if isinstance(node, dict):
        yield from node.get("column_names", ())
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from _names(child)


def query_error(error: duckdb.Error, what: str = "the query") -> QueryError:
    """Turn what DuckDB says, at parsing or while rows are read, into our kind of error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    message = lines[0].strip()
    close = re.search(r'(?:Did you mean|Candidate bindings:) "(?!pg_|duckdb_)([^"]+)"', str(error))
    hint = f"; did you mean `{close[1]}`?" if close else ""
    missing = re.search(r"Table with name (\S+) does not exist", message)
    if missing:
        hint = hint or nearest(missing[1], TABLES)
        return QueryError(f"there is no table or view `{missing[1]}`{hint}")
    column = re.search(r'Referenced column "([^"]+)" not found', message)
    if column:
        return QueryError(f"{what} names a column `{column[1]}` that is not there{hint}")
    kind, _, rest = message.partition(": ")
    rest = rest if len(rest) <= _LONGEST else f"{rest[:_LONGEST]}..."
    verb = {"Parser Error": "does not parse", "Permission Error": "may only read the store"}
    place = next((line for line in lines if line.startswith("LINE ")), "")
    detail = f"{rest or kind} ({place.strip()})" if place else (rest or kind)
    return QueryError(f"{what} {verb.get(kind, 'is not valid')}: {detail}")
