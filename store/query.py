"""SQL over the store: a DuckDB session that sees all tables and views, and can only read."""

import atexit
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from weakref import WeakSet

import duckdb
import lance
import pyarrow as pa
import pyarrow.dataset as pds

from . import join_filters, query_scope
from .blobs import readable
from .errors import ConfigError, QueryError, RlakeError, StarvedError, damaged, nearest, shorten
from .schema import TABLES
from .schema_versions import missing

_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+|\([\w\s,]*\)\s*)?", re.IGNORECASE)
"""The header of an EXPLAIN. It admits no comment, so that the rest is exactly what DuckDB runs."""
_BROKEN = re.compile(r"the stream registered as '(?:stored_|plain_)?(\w+)' failed: (.*)", re.DOTALL)
# Anyone's SQL runs under these: no files or network, no extension that is downloaded at run time,
# no Python variable of a caller that is read as a table. UTC, or DuckDB shows times in the
# machine's zone. The lock comes last, or a query could undo the others.
_SETTINGS = """
SET GLOBAL TimeZone = 'UTC';
SET memory_limit = '{memory}';
SET temp_directory = '{spill}';
SET autoinstall_known_extensions = false;
SET python_enable_replacements = false;
{closed}
SET lock_configuration = true;
"""
_MACRO = re.compile(r"^CREATE OR REPLACE MACRO .*?;$", re.DOTALL | re.MULTILINE)
_VIEW = re.compile(r"^CREATE OR REPLACE VIEW (\w+) AS(.*?);$", re.DOTALL | re.MULTILINE)
_ANY_NAME = re.compile(
    r"\b(query|query_table|show|describe|summarize|information_schema|(duckdb|pg|pragma|sqlite)_\w+)\b"
)
"""What lets a query read, or list, names that do not stand in its text as such."""
MEMORY = "RLAKE_SQL_MEMORY"
"""Environment variable: memory limit of queries, such as `4GB`; by default a quarter of RAM."""
_MEMORY = re.compile(r"[1-9]\d*(\.\d+)?\s*[KMGT]i?B", re.IGNORECASE)
_STANDING = ("tasks_current", "experiences_current", "preferences_current")
_STANDING += ("scores_standing", "feedback_standing")
"""Views of a table without the rows that were taken back."""
Rows = lance.LanceDataset | pa.Table | pds.Dataset
"""What DuckDB reads as a table."""
_timers: WeakSet[threading.Timer] = WeakSet()


@atexit.register
def _stop_timers() -> None:
    """Stop running timers: they hold sessions, which must be closed before DuckDB is unloaded."""
    for timer in list(_timers):
        timer.cancel()
        timer.join(1)


def _unlocked() -> duckdb.DuckDBPyConnection:
    database = duckdb.connect(":memory:")
    for macro in _MACRO.findall(_read("views.sql")):
        database.execute(macro)
    return database


@cache
def _database(settings: str) -> duckdb.DuckDBPyConnection:
    """Return the database in memory that sessions with these settings share.

    One takes 20 ms to open, and a connection to it microseconds. Sessions stay apart since all that
    they make is temporary, which in DuckDB is of one connection.
    """
    database = _unlocked()
    database.execute(settings)
    return database


def _settings(*, files: bool = False) -> str:
    spill = (Path(gettempdir()) / f"rlake-sql-{os.getpid()}").as_posix().replace("'", "''")
    closed = "" if files else "SET enable_external_access = false;"
    return _SETTINGS.format(closed=closed, memory=_memory(), spill=spill)


@cache
def _planner() -> duckdb.DuckDBPyConnection:
    """Return the database without rows in which queries are planned for `join_filters`."""
    database = _unlocked()
    join_filters.prepare(database, views_sql())
    database.execute(_settings())
    return database


@lru_cache(16)
def _plan(query: str) -> dict[str, Any] | None:
    return join_filters.plan(query, _planner().cursor())


@cache
def _views() -> dict[str, str]:
    """Return the query of each view, by the view's name."""
    return dict(_VIEW.findall(views_sql()))


def view_names() -> tuple[str, ...]:
    """Return the names of all views."""
    return tuple(_views())


@cache
def _sources(view: str) -> frozenset[str]:
    """Return the tables and views that the query of a view reads."""
    return frozenset(re.findall(r"\b(?:FROM|JOIN)\s+(?:plain_)?(\w+)", view))


def names_read(query: str, views: Mapping[str, str] | None = None) -> dict[str, None]:
    """Return the tables and views that a query may read, views after what they read themselves.

    The words of its text are compared, so there may be more of them than it reads, never less.

    >>> list(names_read("SELECT * FROM draws_current"))
    ['draws', 'job_events', 'superseded_steps', 'draws_current']
    """
    views = _views() if views is None else views
    known = sorted({*TABLES, *views})
    found: dict[str, None] = {}

    def follow(names: Iterable[str]) -> None:
        for name in names:
            if name not in found:
                # not itself: a relation that stands in for a table has the table's name
                follow(n for n in known if n in _sources(views.get(name, "")) and n != name)
                found[name] = None

    text = query.lower()
    words = set(re.findall(r"\w+", text))
    follow(n for n in known if n in words or _ANY_NAME.search(text))
    return found


class QuerySession:
    """A DuckDB session over given versions of the tables; not thread-safe."""

    def __init__(
        self,
        *,
        views: bool = True,
        files: bool = False,
        instead: Mapping[str, str] | None = None,
        shared: bool = True,
        on: duckdb.DuckDBPyConnection | None = None,
    ) -> None:
        """Open a session; with `files`, its queries may read files too.

        `on` is a connection of the user's, in which everything is shown by `show_all`.

        One that is not `shared` has a database with settings of its own until `_lock` is called.

        `instead` maps table names to relations that replace them. A relation reads the table itself
        as `plain_NAME`; views see the relation.
        """
        made = on or (_database(_settings(files=files)).cursor() if shared else _unlocked())
        self._con: duckdb.DuckDBPyConnection = made
        self._instead = {n: f"SELECT * FROM {r}" for n, r in (instead or {}).items()}
        self._views = {**(_views() if views else {}), **self._instead}
        self._files = files
        self._reads_whole = not views or not shared or bool(instead)
        self._versions: Mapping[str, int] = {}
        self._at: dict[str, tuple[int, Rows]] = {}
        self._opened: dict[str, int] = {}
        self._made: dict[str, str] = {}
        self._frames: list[str] = []
        self._timer: threading.Timer | None = None

    def show(self, versions: Mapping[str, int], open_at: Callable[[str, int], Rows]) -> None:
        """Let the table names mean these versions; a query opens the tables that it reads."""
        self._versions, self._open_at = dict(versions), open_at

    def show_all(self) -> None:
        """Open all tables, views and macros, for queries that are not run by this session."""
        for macro in _MACRO.findall(views_sql()):
            self._con.execute(macro.replace("MACRO", "TEMP MACRO", 1))
        self._open_for("SHOW ALL TABLES")

    def _rows(self, name: str) -> Rows:
        """Return a table as it is shown."""
        version, (known, rows) = self._versions[name], self._at.get(name, (None, None))
        if rows is None or known != version:
            rows = self._open_at(name, version)
            rows = readable(name, rows) if isinstance(rows, lance.LanceDataset) else rows
            self._at[name] = version, rows
        return rows

    def _filtered(self, query: str) -> "QuerySession | None":
        """Return a session that shows the rows which a query's joins can match, if it differs.

        It is the query's own: a relation looks its tables up again when its rows are asked for.
        """
        read = [n for n in names_read(query, self._views) if n in self._versions and n in TABLES]
        if self._reads_whole or not read:
            return None
        tables = {n: rows for n in read if isinstance(rows := self._rows(n), lance.LanceDataset)}
        only = join_filters.join_filters(query, tables, _plan)
        if not only:
            return None

        def open_at(name: str, version: int) -> Rows:
            if name in only:
                return join_filters.FilteredDataset(tables[name], only[name])
            return self._rows(name) if name in tables else self._open_at(name, version)

        session = QuerySession(files=self._files)
        session._reads_whole = True
        session.show(self._versions, open_at)
        return session

    def _lock(self) -> None:
        self._con.execute(_settings())

    def _open_for(self, query: str) -> None:
        """Open what a query reads: tables that moved since they were opened, and missing views."""
        of_user = self._versions.keys() - TABLES.keys()
        for name in self._opened.keys() - of_user - TABLES.keys():  # the user removed it
            self._con.unregister(name)
            del self._opened[name], self._at[name]
        for name in (*names_read(query, self._views), *sorted(of_user)):
            version = self._versions.get(name)
            if version is not None and self._opened.get(name) != version:
                self._show(name, self._rows(name))
                self._opened[name] = version
            if name in self._views:
                self._make_view(name, self._views[name])

    def _make_view(self, name: str, query: str) -> None:
        if name in _STANDING and self._versions.get("withdrawals", 1) <= 1:
            # the first version of a table is empty: nothing was taken back, all rows count
            query = f"SELECT * FROM {name.partition('_')[0]}"
        if self._made.get(name) != query:
            self._con.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {query}")
            self._made[name] = query

    def _show(self, name: str, rows: Rows) -> None:
        """Show these rows as a table; columns that were added later are NULL."""
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
        """Register rows in memory under a name."""
        self._con.register(name, rows)

    def join(self, frames: Mapping[str, Any]) -> None:
        """Register frames (Polars, pandas, Arrow) under names until the next call.

        Raises QueryError for the name of a table or view, and for a value that is not a frame.
        """
        if not (frames or self._frames):
            return
        import polars as pl

        self._check_free()
        taken = {*TABLES, *self._views, *self._versions}
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
        """Return the relation of one SELECT; raise QueryError for any other statement.

        After `seconds`, reading its rows is interrupted, and when its scope is cancelled.
        """
        self._check_free()
        filtered = self._filtered(query)
        if filtered is not None:
            return filtered.sql(query, what=what, seconds=seconds)
        self._open_for(query)
        query_scope.join(self._con.interrupt)
        if seconds is not None:
            self._timer = threading.Timer(seconds, self._con.interrupt)
            self._timer.daemon = True
            self._timer.start()
            _timers.add(self._timer)
        kinds = self._kinds(query, what)
        if kinds == ["EXPLAIN"]:  # EXPLAIN ANALYZE runs its statement, which must be a read too
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

    def check_condition(self, where: str, relation: str) -> None:
        """Raise QueryError for a condition that is not a truth value of each row of a relation."""
        what = f"`where` {where!r}"
        kind = self.sql(f"SELECT ({where}\n) FROM {relation}", what=what).types[0]
        if str(kind) != "BOOLEAN":
            raise QueryError(
                f"`where` must be true or false, got {str(kind).lower()} from {where!r}"
            )
        # WHERE refuses aggregates and windows, which would depend on which rows are read together
        self.sql(f"SELECT 1 FROM {relation} WHERE ({where}\n)", what=what)

    def _kinds(self, query: str, what: str) -> list[str]:
        """Return the kinds of the statements in a text, by DuckDB's parser."""
        try:
            return [s.type.name for s in self._con.extract_statements(query)]
        except duckdb.Error as error:
            raise query_error(error, what) from error

    def _check_free(self) -> None:
        """Raise QueryError while the rows of an earlier query are still being read."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            # only a query reveals that rows of an earlier one are still being read
            self._con.execute("SELECT 1").fetchall()
        except duckdb.ResourceInUseException as error:
            raise QueryError(
                "rows of an earlier query are still being read; take them all before the next "
                "query, for example with `.to_arrow_table()` in place of `.to_arrow_reader()`"
            ) from error


def _memory() -> str:
    """Return the memory limit of queries: from the environment, or a quarter of RAM."""
    given = os.environ.get(MEMORY)
    if not given:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // 4 >> 20}MiB"
    if not _MEMORY.fullmatch(given):
        raise ConfigError(f"`{MEMORY}` is {given!r}, expected a size such as `4GB`")
    return given


def views_sql() -> str:
    """Return the views and macros as SQL, for any DuckDB session that has the tables."""
    return _read("views.sql") + "\n" + _read("turns.sql")


def _read(name: str) -> str:
    return files(__package__ or "").joinpath(name).read_text()


def literal(text: str) -> str:
    """Return a text as an SQL literal.

    >>> literal("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


def quoted(name: str) -> str:
    """Return a name of a table or column quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def is_in(column: str, values: Iterable[str]) -> str:
    """Return the SQL condition that a column is one of these texts; never true without texts.

    >>> is_in("run_id", ["a", "it's"]), is_in("run_id", [])
    ("run_id IN ('a', 'it''s')", 'run_id IN (NULL)')
    """
    return f"{column} IN ({', '.join(map(literal, values)) or 'NULL'})"


def columns_of(condition: str, *, table_name: str = "experiences") -> set[str]:
    """Return the columns of a table that an SQL condition reads.

    >>> sorted(columns_of("reward > 0.5 AND len(response_text) < 100"))
    ['response_text', 'reward']

    Raises QueryError when it does not parse as one condition.
    """
    return names_in(condition) & set(TABLES[table_name].names)


def names_in(condition: str) -> set[str]:
    """Return all names of columns, fields and parameters in an SQL condition.

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
    # the line break, here and elsewhere: a condition may end in a `--` comment
    query = f"SELECT 1 FROM experiences WHERE ({condition}\n)"
    return syntax(query, what=f"`where` {condition!r}")


def syntax(query: str, *, what: str) -> dict[str, Any]:
    """Return the syntax tree of one SELECT; QueryError, calling it `what`, when it is none."""
    con = _database(_settings()).cursor()
    try:
        statements = con.extract_statements(query)
        if len(statements) != 1:
            raise QueryError(f"{what} must be one expression, got {len(statements)} statements")
        # by DuckDB's parser: patterns would also find names within strings and comments
        row = con.execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    except duckdb.Error as error:
        raise query_error(error, what) from error
    assert row is not None, "json_serialize_sql returns one row"
    parsed = json.loads(row[0])
    if parsed["error"]:
        raise QueryError(f"{what} cannot be read as a query: {parsed['error_message']}")
    return parsed["statements"][0]["node"]


def nodes(tree: object) -> Iterator[dict[str, Any]]:
    """Walk a syntax tree."""
    if isinstance(tree, dict):
        yield tree
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for child in children:
        yield from nodes(child)


def query_error(error: duckdb.Error, what: str = "the query") -> RlakeError:
    """Turn an error of DuckDB, while parsing or reading rows, into one of ours.

    An unreadable file of the store is a StoreError: no other query would help.
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
        hint = nearest(missing[1], [*TABLES, *_views(), *([close[1]] if close else [])])
        return QueryError(f"no table or view `{missing[1]}`{hint}")
    column = re.search(r'Referenced column "([^"]+)" not found', message)
    if column:
        return QueryError(f"{what} names a column `{column[1]}` that is not there{hint}")
    kind, _, rest = message.partition(": ")
    rest = shorten(rest, 200)
    verb = {"Parser Error": "does not parse", "Permission Error": "may only read the store"}
    place = next((line for line in lines if line.startswith("LINE ")), "")
    detail = f"{rest or kind} ({place.strip()})" if place else (rest or kind)
    return QueryError(f"{what} {verb.get(kind, 'is not valid')}: {detail}")
