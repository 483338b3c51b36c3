"""Sources: a table, a query, a file, or a frame in memory."""

from collections.abc import Sequence
from typing import Literal

import duckdb
import polars as pl
import pyarrow as pa
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from ..operators.body import in_utc
from ..store import Store
from ..store import side_columns as sides
from ..store.errors import OperatorError, QueryError
from ..store.files.file_kind import InputSession, open_input
from ..store.files.select_columns import storage
from ..store.query import QuerySession, nodes, query_error, syntax, tables_of
from ..store.schema import TABLES, table

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_STRICT)
class Table:
    """Rows of a table; as a sink, the table that rows are appended to."""

    table: str
    where: str | None = None
    """SQL condition, for a source only; it may name side columns."""
    with_columns: Sequence[str] = ()
    """Side columns, for a source `experiences` only, such as `reward=score:strict@2`."""
    mode: Literal["append", "replace"] = "append"
    """For a sink only. With `replace`, rows that earlier runs of the same name wrote, and this one
    does not, are withdrawn, as by `rlake undo`."""

    @property
    def side(self) -> tuple[sides.SideColumn, ...]:
        """The side columns; raises QueryError when one is not valid."""
        columns = sides.parse_all(self.with_columns)
        if columns and self.table != "experiences":
            raise QueryError(f"side columns are of `experiences`, and `{self.table}` has none")
        return columns

    @property
    def rows(self) -> str:
        """The FROM clause that reads them."""
        if self.with_columns:
            return f"{sides.from_sql(self.side)} AS {self.table}"
        is_current = self.table in CURRENT
        return f"{self.table}_current AS {self.table}" if is_current else f'"{self.table}"'

    @property
    def select(self) -> str:
        """The SELECT of them."""
        return f"SELECT * FROM {self.rows}" + (f" WHERE ({self.where}\n)" if self.where else "")

    def __str__(self) -> str:
        options = f" with {', '.join(self.with_columns)}" if self.with_columns else ""
        options += ", replaced" if self.mode == "replace" else ""
        return f"table {self.table}{options}" + (f" where {self.where}" if self.where else "")


@dataclass(frozen=True, config=_STRICT)
class Sql:
    """Rows of one SELECT over the store's tables and views."""

    sql: str

    @property
    def select(self) -> str:
        """The SELECT of them."""
        return self.sql.strip().rstrip(";")

    def __str__(self) -> str:
        return f"sql {' '.join(self.sql.split())}"


@dataclass(frozen=True, config=_STRICT)
class File:
    """Rows of a file (JSONL, JSON, CSV, Parquet); as a sink, the file to write (no CSV or JSON)."""

    file: str
    sql: str | None = None
    """For a source only: a SELECT over the table `input`, which is the file."""

    def __str__(self) -> str:
        return f"file {self.file}" + (f" by {' '.join(self.sql.split())}" if self.sql else "")


Source = Table | Sql | File | pl.LazyFrame | pl.DataFrame
"""What a pipeline may read."""


CURRENT = frozenset({"tasks", "experiences", "preferences"})
"""Tables whose rows may be undone; a source has the others."""
TAKEN_BACK = ("withdrawals", "members")
"""Tables that say which of those rows were undone."""
OF_RUNS = frozenset({"lineage", "drops", "operator_errors", "expectations"})
"""Tables that every pipeline run writes and no view reads."""


def describe(source: Source) -> str:
    """Return a source in words."""
    return "a frame in memory" if isinstance(source, pl.LazyFrame | pl.DataFrame) else str(source)


def schema(source: Source) -> pl.Schema:
    """Return the columns of a source without reading its rows (except to infer a file's types).

    Raises QueryError, InputError or NotFoundError when it cannot be read.
    """
    if isinstance(source, Table):
        declared = table(source.table)
        if not source.where and not source.with_columns:  # else SQL is checked too
            return pl.DataFrame(pl.from_arrow(declared.schema.empty_table())).schema
    if isinstance(source, pl.LazyFrame | pl.DataFrame):
        return source.lazy().collect_schema()
    if isinstance(source, File):
        with open_input(source.file) as file:
            session = InputSession(file, None)
            return rows_of(session.select(source.sql or "SELECT * FROM input"), limit=0).schema
    # over the store's tables without rows: a pipeline is checked before there is a store
    console = QuerySession()
    console.show(dict.fromkeys(TABLES, 1), lambda name, _: TABLES[name].schema.empty_table())
    if isinstance(source, Sql):
        return rows_of(console.sql(source.sql), limit=0).schema
    declared = dict.fromkeys([*table(source.table).names, *(c.alias for c in source.side)])
    names = ", ".join(f'"{c}"' for c in declared)
    where = f" WHERE ({source.where}\n)" if source.where else ""
    return rows_of(console.sql(f"SELECT {names} FROM {source.rows}{where}"), limit=0).schema


def are_taken_back(source: Source, store: Store) -> bool:
    """Return whether rows of a source's table may have been undone."""
    is_one = isinstance(source, Table) and source.table in CURRENT
    return is_one and store.count("withdrawals") > 0


def versions_read(source: Source, store: Store) -> dict[str, int]:
    """Return the versions of the tables that a source reads."""
    if isinstance(source, Table):
        read = {source.table, *(c.table for c in source.side)}
        return {name: v for name, v in store.versions().items() if name in read}
    is_query = isinstance(source, Sql) or (isinstance(source, File) and source.sql is not None)
    return store.versions() if is_query else {}


def tables_read(source: Source) -> set[str]:
    """Return the tables that a source reads, by its name, its side columns and its SQL.

    >>> sorted(tables_read(Table("experiences", with_columns=["derived:quality"])))
    ['experience_values', 'experiences', 'job_events']
    """
    if isinstance(source, Table):
        read = {source.table, *(c.table for c in source.side)}
        # the trainer's restarts decide which derived values count
        read |= {"job_events"} if "experience_values" in read else set()
        return read | (tables_of(source.where) if source.where else set())
    query = source.sql if isinstance(source, Sql | File) else None
    if query is None:
        return set()
    tree = syntax(query.strip().rstrip(";"), what="the query")
    named = {str(n["table_name"]) for n in nodes(tree) if n.get("table_name")} - {"input"}
    if named <= set(TABLES):
        return named
    return (named & set(TABLES)) | (set(TABLES) - OF_RUNS)  # a view may read any of the others


def check_groups(source: Source, store: Store) -> None:
    """Raise OperatorError when a `where` or a query keeps a part of some stored group's rewards."""
    what, cut = "where", None
    if isinstance(source, Table) and source.table == "experiences" and source.where:
        cut = _cut_by_where(source, store)
    if isinstance(source, Sql):
        what, cut = "sql", _cut_by_query(source.sql, store)
    if cut:
        group, num_kept, num_all = cut
        raise OperatorError(
            f"the source's `{what}` keeps {num_kept} of {num_all} rewards of the group {group!r}, "
            "but group statistics need the whole group; choose whole groups, or put the condition "
            "as `keep` after the operators of whole groups"
        )


def _cut_by_where(source: Table, store: Store) -> tuple[str, int, int] | None:
    """Return a group that is cut, with its numbers of rewards kept and stored."""
    cut = store.sql(
        "SELECT group_id, count(*) FILTER (kept) AS num_kept, count(*) AS num_all FROM "
        f"(SELECT group_id, coalesce(({source.where}\n), false) AS kept FROM {source.rows} "
        "WHERE reward IS NOT NULL) "
        "GROUP BY group_id HAVING num_kept > 0 AND num_kept < num_all LIMIT 1"
    ).fetchall()
    return cut[0] if cut else None


def _cut_by_query(sql: str, store: Store) -> tuple[str, int, int] | None:
    """Return the same for a query; rows whose id and group are not stored are not compared."""
    found = store.sql(sql)
    if not {"experience_id", "group_id"} <= set(found.columns):
        return None
    group = ["group_id", *(["run_id"] if "run_id" in found.columns else [])]
    row = ["experience_id", *group]
    scored = found.filter("reward IS NOT NULL") if "reward" in found.columns else found
    kept = rows_of(scored.project(", ".join(f"{n}::VARCHAR AS {n}" for n in row))).unique()
    stored = rows_of(
        store.sql(f"SELECT {', '.join(row)} FROM experiences WHERE reward IS NOT NULL")
    )
    is_kept = pl.col("kept").count()  # of those that are not NULL
    cut = (
        stored.join(kept.with_columns(kept=True), on=row, how="left", nulls_equal=True)
        .group_by(group)
        .agg(num_kept=is_kept, num_all=pl.len())
        .filter(pl.col("num_kept").is_between(1, pl.col("num_all") - 1))
        .sort(group)
    )
    return None if cut.is_empty() else cut.select("group_id", "num_kept", "num_all").row(0)


def rows_of(relation: duckdb.DuckDBPyRelation, *, limit: int | None = None) -> pl.DataFrame:
    """Return a relation's rows (or the first `limit`), with JSON as text and times in UTC."""
    names = relation.columns
    twice = [n for n in names if names.count(n) > 1]
    if twice:
        raise QueryError(f"the query gives two columns `{twice[0]}`; name one of them otherwise")
    try:
        found = (relation if limit is None else relation.limit(limit)).to_arrow_table()
    except duckdb.Error as error:
        raise query_error(error) from error
    return in_utc(pl.DataFrame(pl.from_arrow(found.cast(plain(found.schema)))))


def plain(schema: pa.Schema) -> pa.Schema:
    """Return a schema with the types under DuckDB's own, such as text for JSON."""
    return pa.schema(pa.field(f.name, storage(f.type)) for f in schema)
