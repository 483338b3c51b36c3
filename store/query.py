"""SQL over the store: a DuckDB session that sees all tables and views, and can only read."""

import atexit
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from weakref import WeakSet

import duckdb
import lance
import polars as pl
import pyarrow as pa

from .errors import ConfigError, QueryError, RlakeError, StarvedError, damaged, nearest
from .schema import TABLES
from .schema_versions import missing

_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+|\([\w\s,]*\)\s*)?", re.IGNORECASE)
"""What stands before the statement that is explained. It can hold no comment, so that what is
behind it is what DuckDB runs."""
_BROKEN = re.compile(r"the stream registered as '(?:stored_|plain_)?(\w+)' failed: (.*)", re.DOTALL)
_LONGEST = 200
_SETTINGS = """
SET TimeZone = 'UTC';
SET memory_limit = '{memory}';
SET temp_directory = '{spill}';
SET autoinstall_known_extensions = false;
SET python_enable_replacements = false;
{closed}
SET lock_configuration = true;
"""
_OF_TURNS = re.compile(r"\b(turns|tool_calls)\b", re.IGNORECASE)
MEMORY = "RLAKE_SQL_MEMORY"
"""Environment variable: what a session's queries may take, such as `4GB`; a quarter by default."""
_MEMORY = re.compile(r"[1-9]\d*(\.\d+)?\s*[KMGT]i?B", re.IGNORECASE)
_NAMES = "SELECT view_name FROM duckdb_views() UNION ALL SELECT table_name FROM duckdb_tables()"


_STANDING = ("tasks_current", "experiences_current", "preferences_current")
_STANDING += ("scores_standing", "feedback_standing")
"""Views of a table without what was taken back."""
_timers: WeakSet[threading.Timer] = WeakSet()


@atexit.register
def _stop_timers() -> None:
    """End the timers that run still: they hold sessions, which must go before DuckDB does."""
    for timer in list(_timers):
        timer.cancel()
        timer.join(1)


class QuerySession:
    """One DuckDB session over given versions of the tables. Not to be shared between threads."""

    def __init__(
        self,
        *,
        views: bool = True,
        files: bool = False,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        """Open a session; with `files` its queries may read files, too.

        `instead` has relations that stand in for tables, by the table's name. A relation reads the
        table itself as `plain_NAME`; views see the relation.
        """
        self._con = duckdb.connect(":memory:")
        self._versions: dict[str, int] = {}
        self._views, self._files, self._open = views, files, True
        self._has_turns = not views
        self._instead = instead or {}
        self._frames: list[str] = []
        self._is_all = False
        self._timer: threading.Timer | None = None

    def show(
        self,
        versions: Mapping[str, int],
        open_at: Callable[[str, int], lance.LanceDataset | pa.Table],
    ) -> None:
        """Let the table names mean these versions; only tables that moved are opened again."""
        self._check_free()
        for name in self._versions.keys() - versions.keys():  # a table of the user's is gone
            self._con.unregister(name)
        for name, version in versions.items():
            if self._versions.get(name) != version:
                self._show(name, open_at(name, version))
        self._versions = dict(versions)
        if self._open:
            self._make_views()
            spill = (Path(gettempdir()) / f"rlake-sql-{os.getpid()}").as_posix().replace("'", "''")
            closed = "" if self._files else "SET enable_external_access = false;"
            settings = _SETTINGS.format(closed=closed, memory=_memory(), spill=spill)
            self._con.execute(settings)
        self._open = False
        if self._views:
            self._let_all_count(is_all=versions.get("withdrawals", 1) <= 1)

    def _let_all_count(self, *, is_all: bool) -> None:
        """Let views of what counts be the tables themselves while nothing was taken back."""
        if is_all == self._is_all:
            return
        if not is_all:
            self._make_views()
        for name in _STANDING if is_all else ():
            table = name.partition("_")[0]
            self._con.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {table}")
        self._is_all = is_all

    def _make_views(self) -> None:
        """Make the views; a relation that stands in for a table may read some of them itself."""
        plain = {name: f"plain_{name}" for name in self._instead}
        views = _read("views.sql") if self._views else ""
        self._con.execute(views if not plain else "")
        for relations in (plain, self._instead) if plain else ():
            for name, relation in relations.items():
                self._con.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS SELECT * FROM {relation}")
            self._con.execute(views)  # again, since they hold to the columns that a table has

    def _show(self, name: str, rows: "lance.LanceDataset | pa.Table") -> None:
        """Let a table's name mean these rows; columns that came to the table later are NULL."""
        later = missing(name, rows.schema) if name in TABLES else []
        shown = f"plain_{name}" if name in self._instead else name
        self._con.register(f"stored_{name}" if later else shown, rows)
        if later:
            types = self._con.from_arrow(pa.schema(later).empty_table()).types
            nulls = ", ".join(
                f"NULL::{kind} AS {c.name}" for c, kind in zip(later, types, strict=True)
            )
            self._con.execute(
                f"CREATE OR REPLACE TEMP VIEW {shown} AS SELECT *, {nulls} FROM stored_{name}"
            )

    def put(self, name: str, rows: pa.Table) -> None:
        """Let a name mean rows in memory."""
        self._con.register(name, rows)

    def join(self, frames: Mapping[str, Any]) -> None:
        """Let names mean frames (Polars, pandas, Arrow) until the next call.

        Raises QueryError for a name that a table or view has, or for what is not a frame.
        """
        if not (frames or self._frames):
            return
        self._check_free()
        taken = {name for (name,) in self._con.execute(_NAMES).fetchall()} - set(self._frames)
        taken |= {"turns", "tool_calls"}
        while self._frames:
            self._con.unregister(self._frames.pop())
        for name, frame in frames.items():
            if name.lower() in taken:
                raise QueryError(f"`{name}` is a table or view of the store; rename the frame")
            rows = frame.collect() if isinstance(frame, pl.LazyFrame) else frame
            try:
                self._con.register(name, rows)
            except duckdb.Error as error:
                raise QueryError(
                    f"`{name}` must be a frame (Polars, pandas or Arrow), got "
                    f"{type(frame).__name__}"
                ) from error
            self._frames.append(name)

    def sql(
        self, query: str, *, what: str = "the query", seconds: float | None = None
    ) -> duckdb.DuckDBPyRelation:
        """Return the relation of one SELECT; all that is not a single read raises QueryError.

        After `seconds`, what reads its rows is interrupted.
        """
        self._check_free()
        if not (self._has_turns or self._open) and _OF_TURNS.search(query):
            self._con.execute(_read("turns.sql"))
            self._has_turns = True
        if seconds is not None:
            self._timer = threading.Timer(seconds, self._con.interrupt)
            self._timer.daemon = True
            self._timer.start()
            _timers.add(self._timer)
        kinds = self._kinds(query, what)
        if kinds == ["EXPLAIN"]:  # with ANALYZE it runs what it explains: that must be a read too
            header = _EXPLAIN.match(query)
            kinds = self._kinds(query[header.end() :], what) if header else kinds
        if kinds != ["SELECT"]:
            got = " then ".join(kinds) or "nothing"
            raise QueryError(
                f"the store is read with one SELECT, got {got}; EXPLAIN may stand before it, "
                "rows are added with `append`, `rlake import` or a pipeline"
            )
        try:
            relation = self._con.sql(query)
        except duckdb.Error as error:
            raise query_error(error, what) from error
        assert relation is not None, "a SELECT always has a relation"
        return relation

    def _kinds(self, query: str, what: str) -> list[str]:
        """Return what DuckDB's parser takes the statements of a text for."""
        try:
            return [s.type.name for s in self._con.extract_statements(query)]
        except duckdb.Error as error:
            raise query_error(error, what) from error

    def _check_free(self) -> None:
        """Raise QueryError while the rows of an earlier query are being read: one at a time."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._con.execute("SELECT 1").fetchall()
        except duckdb.ResourceInUseException as error:
            raise QueryError(
                "rows of an earlier query are still being read; take them all before the next "
                "query, for example with `.to_arrow_table()` in place of `.to_arrow_reader()`"
            ) from error


def _memory() -> str:
    """Return what queries may take: as the environment says, or a quarter of the machine's."""
    given = os.environ.get(MEMORY)
    if not given:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 4 >> 20}MiB"
    if not _MEMORY.fullmatch(given):
        raise ConfigError(f"`{MEMORY}` is {given!r}, expected a size such as `4GB`")
    return given


def views_sql() -> str:
    """Return the views and macros as SQL over the tables: DuckDB runs it where these have names."""
    return _read("views.sql") + "\n" + _read("turns.sql")


def _read(name: str) -> str:
    return files(__package__ or "").joinpath(name).read_text()


def literal(text: str) -> str:
    """Return a text as it is written in SQL.

    >>> literal("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


def columns_of(condition: str, *, table_name: str = "experiences") -> set[str]:
    """Return the columns of a table that an SQL condition reads.

    >>> sorted(columns_of("reward > 0.5 AND len(response_text) < 100"))
    ['response_text', 'reward']

    Raises QueryError when it does not parse as one condition.
    """
    return names_in(condition) & set(TABLES[table_name].names)


def names_in(condition: str) -> set[str]:
    """Return all names of columns, of fields and of parameters that an SQL condition holds.

    >>> sorted(names_in("list_sum(list_transform(rewards, lambda r: r.value)) > level"))
    ['level', 'r', 'rewards', 'value']
    """
    return {name for node in nodes(_parsed(condition)) for name in node.get("column_names", ())}


def tables_of(condition: str) -> set[str]:
    """Return the tables that the subqueries of an SQL condition read.

    >>> tables_of("experience_id IN (SELECT experience_id FROM scores WHERE value > 0)")
    {'scores'}
    """
    tree = _parsed(condition)["where_clause"]
    return {str(node.get("table_name")) for node in nodes(tree)} & set(TABLES)


def _parsed(condition: str) -> dict[str, Any]:
    """Return the parsed query that has the condition in its WHERE clause."""
    query = f"SELECT 1 FROM experiences WHERE ({condition}\n)"
    return syntax(query, what=f"`where` {condition!r}")


_parser = threading.local()
"""A connection that parses, for each thread: to open one takes longer than to parse."""


def syntax(query: str, *, what: str) -> dict[str, Any]:
    """Return the syntax tree of one SELECT; QueryError, calling it `what`, when it is none."""
    if not hasattr(_parser, "con"):
        _parser.con = duckdb.connect(":memory:")
    try:
        statements = _parser.con.extract_statements(query)
        if len(statements) != 1:
            raise QueryError(f"{what} must be one expression, got {len(statements)} statements")
        row = _parser.con.execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    except duckdb.Error as error:
        raise query_error(error, what) from error
    assert row is not None, "json_serialize_sql returns one row"
    parsed = json.loads(row[0])
    if parsed["error"]:
        raise QueryError(f"{what} is no query that can be read: {parsed['error_message']}")
    return parsed["statements"][0]["node"]


def nodes(tree: object) -> Iterator[dict[str, Any]]:
    """Walk a syntax tree."""
    if isinstance(tree, dict):
        yield tree
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for child in children:
        yield from nodes(child)


def query_error(error: duckdb.Error, what: str = "the query") -> RlakeError:
    """Turn what DuckDB says, at parsing or while rows are read, into our kind of error.

    A file of the store that cannot be read is a StoreError: no other query would help.
    """
    broken = _BROKEN.search(str(error))
    if broken and broken[1] in TABLES:
        return damaged(f"table `{broken[1]}`", Exception(broken[2]))
    if isinstance(error, duckdb.InterruptException):
        return StarvedError(f"{what} took longer than it was given; ask for less, or give it more")
    if isinstance(error, duckdb.OutOfMemoryException):
        return QueryError(
            f"{what} needs more memory than it may take; ask for less, or set `{MEMORY}`, such as "
            "`8GB`: it is a quarter of the machine's by default"
        )
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
