"""The forms that an operator's body may have, and how each is applied to a LazyFrame."""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import duckdb
import lance
import polars as pl
import pyarrow as pa

from ..store.errors import OperatorError
from ..store.query import Console, query_error
from .waiting import answers

BATCH_ROWS = 1024
"""Rows that a `Batches` function sees at a time."""

ERROR = "error_of_the_row"
"""Column in which a body of `Rows` says what went wrong with single rows."""

_NO_ROWS = pa.table({"nothing": pa.array([], pa.int64())})
_idle: deque[Console] = deque(maxlen=4)

FrameFunction = Callable[[pl.LazyFrame], pl.LazyFrame]


@dataclass(frozen=True)
class Value:
    """One value a row, as an SQL expression in DuckDB's dialect over the row's columns."""

    sql: str


@dataclass(frozen=True)
class Batches:
    """A function of Arrow record batches, for Python, models and other libraries.

    `function` gets up to BATCH_ROWS rows at a time, in order, and returns a batch with as many rows
    and exactly the declared `columns`; they are put beside, or in place of, those of the row.
    """

    function: Callable[[pa.RecordBatch], pa.RecordBatch]
    columns: Mapping[str, pl.DataType | type[pl.DataType]]


@dataclass(frozen=True)
class Rows:
    """A function of one row, plain or `async`, for what waits: a model, a judge, a subprocess.

    `function` gets a row as a mapping and returns the declared `columns` as another. At most
    `at_once` calls of an `async` function are under way; a call that raises, or takes longer than
    `seconds`, is the error of that row alone.
    """

    function: Callable[[dict[str, Any]], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
    columns: Mapping[str, pl.DataType | type[pl.DataType]]
    at_once: int = 16
    seconds: float = 60.0


@dataclass(frozen=True)
class Explained:
    """A filter's or a reshape's body, with the reason that each dropped row is given.

    A reason is a text, or a Polars expression over the columns that came in.
    """

    rows: "pl.Expr | FrameFunction | str | Value | Batches | Rows"
    reason: str | pl.Expr


PlainBody = pl.Expr | Sequence[pl.Expr] | FrameFunction | str | Value | Batches | Rows | Explained
"""What an operator does, in any of the forms that it may be written in."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A body with what is declared otherwise for these parameters than in `@operator`."""

    body: PlainBody
    kind: str | None = None
    reads: Sequence[str] | None = None
    writes: Sequence[str] | None = None
    sees: str | None = None


Body = PlainBody | Declared
"""What the function under `@operator` may return."""


def produce(body: PlainBody, frame: pl.LazyFrame, *, into: str | None) -> pl.LazyFrame:
    """Apply a body to a frame; `into` names the column of a body that is one value a row."""
    match body:
        case Explained(rows=rows):
            return produce(rows, frame, into=into)
        case pl.Expr():
            return frame.with_columns(body.alias(into) if into else body)
        case str():
            return _sql(body, frame)
        case Value(sql=sql):
            return _value(sql, frame, into or "value")
        case Batches():
            return _batches(body, frame)
        case Rows():
            return _rows(body, frame)
        case Sequence():
            return frame.with_columns(*body)
        case _:
            return body(frame)


def describe(body: PlainBody) -> str:
    """Return a body's text, for the reason of a filter that gives none."""
    match body:
        case Explained(rows=rows):
            return describe(rows)
        case Value(sql=sql) | str(sql):
            return sql
        case pl.Expr():
            return str(body)
        case _:
            return "no condition is shown for a function"


_PLACE = "place_of_the_row"


def evaluate(query: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Run one SELECT over the table `input`; it can reach nothing else.

    >>> evaluate("SELECT sum(x)::INT AS total FROM input", pl.DataFrame({"x": [1, 2]})).rows()
    [(3,)]

    Raises QueryError when it does not parse, or names what is not there.
    """
    # to open a session takes longer than most queries, and one serves one thread at a time
    console = _take()
    try:
        console.put("input", rows.to_arrow(compat_level=pl.CompatLevel.newest()))
        found = console.sql(query).to_arrow_table()
    except duckdb.Error as error:
        raise query_error(error) from error
    finally:
        console.put("input", _NO_ROWS)
        _idle.append(console)
    return in_utc(pl.DataFrame(pl.from_arrow(found)))


def _take() -> Console:
    with suppress(IndexError):
        return _idle.pop()
    console = Console(views=False)
    console.show({}, _nothing)
    return console


def in_utc(rows: pl.DataFrame) -> pl.DataFrame:
    """Give all times the zone UTC: DuckDB names the machine's."""
    zoned = [
        pl.col(name).dt.convert_time_zone("UTC")
        for name, kind in rows.schema.items()
        if isinstance(kind, pl.Datetime) and kind.time_zone not in (None, "UTC")
    ]
    return rows.with_columns(zoned)


def _as(rows: pl.DataFrame, schema: Mapping[str, pl.DataType | type[pl.DataType]]) -> pl.DataFrame:
    return rows.select(pl.col(name).cast(kind) for name, kind in schema.items())


def _nothing(name: str, version: int) -> lance.LanceDataset:
    raise AssertionError(f"no table is shown, `{name}` {version} was asked for")


def _sql(query: str, frame: pl.LazyFrame) -> pl.LazyFrame:
    empty = frame.collect_schema().to_frame()
    schema = evaluate(query, empty).schema
    return frame.map_batches(lambda rows: _as(evaluate(query, rows), schema), schema=schema)


def _value(sql: str, frame: pl.LazyFrame, into: str) -> pl.LazyFrame:
    query = f"SELECT ({sql}\n) AS value FROM input"
    schema = frame.collect_schema()
    empty = evaluate(query, schema.to_frame())
    kind = empty.schema["value"]
    if kind.is_decimal():
        kind = pl.Float64()
    if not empty.height:  # an aggregate gives a row of nothing, and is refused below
        query += f" ORDER BY {_PLACE}"  # windows and subqueries give the rows in any order

    def add(rows: pl.DataFrame) -> pl.DataFrame:
        values = evaluate(query, rows.with_row_index(_PLACE))["value"]
        if len(values) != rows.height:
            raise OperatorError(
                f"`{sql}` gives {len(values)} values for {rows.height} rows, expected one a row; "
                "write an aggregate as `avg(x) OVER (PARTITION BY group_id)`"
            )
        return rows.with_columns(values.cast(kind).alias(into))

    return frame.map_batches(add, schema={**schema, into: kind})


def _batches(body: Batches, frame: pl.LazyFrame) -> pl.LazyFrame:
    schema = {**frame.collect_schema(), **body.columns}

    def add(rows: pl.DataFrame) -> pl.DataFrame:
        made = [_one_batch(body, part) for part in rows.iter_slices(BATCH_ROWS)]
        empty = pl.DataFrame(schema=dict(body.columns))
        return rows.with_columns(pl.concat([empty, *made]).get_columns())

    return frame.map_batches(add, schema=schema)


def _rows(body: Rows, frame: pl.LazyFrame) -> pl.LazyFrame:
    schema = {**frame.collect_schema(), **body.columns, ERROR: pl.String()}

    def add(rows: pl.DataFrame) -> pl.DataFrame:
        told = answers(body.function, rows.to_dicts(), at_once=body.at_once, seconds=body.seconds)
        made = [_declared(body, values) for values, _ in told]
        values = pl.DataFrame(made, schema=dict(body.columns), orient="row")
        errors = pl.Series(ERROR, [error for _, error in told], pl.String)
        return rows.with_columns(*values.get_columns(), errors)

    return frame.map_batches(add, schema=schema)


def _declared(body: Rows, values: Mapping[str, Any] | None) -> dict[str, Any]:
    if values is None:
        return dict.fromkeys(body.columns)
    if set(values) != set(body.columns):
        raise OperatorError(
            f"a row function returned {sorted(values)}, expected exactly {sorted(body.columns)}"
        )
    return dict(values)


def _one_batch(body: Batches, part: pl.DataFrame) -> pl.DataFrame:
    [batch] = part.rechunk().to_arrow().to_batches()
    made = body.function(batch)
    if made.num_rows != part.height or set(made.schema.names) != set(body.columns):
        raise OperatorError(
            f"a batch function returned {made.num_rows} rows of {sorted(made.schema.names)} for "
            f"{part.height} rows, expected as many rows of {sorted(body.columns)}"
        )
    return _as(pl.DataFrame(pl.from_arrow(made)), body.columns)
