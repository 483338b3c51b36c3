"""The forms that an operator's body may have, and how each is applied to a LazyFrame."""

import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

from ..store.errors import OperatorError, QueryError
from ..store.query import QuerySession, query_error, syntax
from .concurrency import answers
from .user_errors import one_line

BATCH_ROWS = 1024
"""Rows that a `Batches` function sees at a time."""

ERROR = "error_of_the_row"
"""Column in which a body returns the errors of single rows."""

PLACE = "place_of_the_row"
"""Column with the order of rows, for engines that do not keep it."""

NAMED = ("metrics", "rewards")
"""Columns that are lists of names with values, which a formula reads by name."""

_NO_ROWS = pa.table({"nothing": pa.array([], pa.int64())})
_idle: deque[QuerySession] = deque(maxlen=4)

FrameFunction = Callable[[pl.LazyFrame], pl.LazyFrame]


@dataclass(frozen=True)
class Value:
    """One value a row, as an SQL expression in DuckDB's dialect over the row's columns."""

    sql: str


@dataclass(frozen=True)
class Batches:
    """A function of Arrow record batches, for Python, models and other libraries.

    `function` gets up to BATCH_ROWS rows at a time, in order, and returns a batch with as many rows
    and exactly the declared `columns`, which are added to the rows or replace theirs.
    """

    function: Callable[[pa.RecordBatch], pa.RecordBatch]
    columns: Mapping[str, pl.DataType | type[pl.DataType]]
    tells_errors: bool = False
    """Whether it also returns ERROR, the error of a row, whose values are used all the same."""
    is_quick: bool = False
    """Whether computing its results is faster than looking them up in the cache."""
    by_group: bool = False
    """Whether it needs groups: it then gets all rows at once; one without a group is its own."""

    @property
    def returned(self) -> Mapping[str, pl.DataType | type[pl.DataType]]:
        """All columns that the function returns."""
        return {**self.columns, ERROR: pl.String()} if self.tells_errors else self.columns


@dataclass(frozen=True)
class Rows:
    """A function of one row, plain or `async`, for slow calls: a model, a judge, a subprocess.

    `function` gets a row as a mapping and returns the declared `columns` as another. At most
    `max_concurrency` calls of an `async` function run at once, each for `timeout` seconds; a plain
    one is called row by row without a timeout. A call that raises, takes too long, or returns other
    columns or types is an error of that row alone.
    """

    function: Callable[[dict[str, Any]], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
    columns: Mapping[str, pl.DataType | type[pl.DataType]]
    max_concurrency: int = 16
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.max_concurrency < 1 or not self.timeout > 0:
            raise OperatorError(
                "`max_concurrency` and `timeout` must be above 0, got "
                f"{self.max_concurrency} and {self.timeout}"
            )


@dataclass(frozen=True)
class Explained:
    """A filter's or a reshape's body, with the reason for each dropped row.

    A reason is a text, or a Polars expression over the input columns; for a reshape it may also be
    a function that adds the column `reason` to the input rows.
    """

    rows: "pl.Expr | FrameFunction | str | Value | Batches | Rows"
    reason: str | pl.Expr | FrameFunction


PlainBody = pl.Expr | Sequence[pl.Expr] | FrameFunction | str | Value | Batches | Rows | Explained
"""What an operator does, in any of the forms that it may be written in."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A body with what depends on the parameters, in place of the arguments of `@operator`."""

    body: PlainBody
    kind: str | None = None
    reads: Sequence[str] | None = None
    may_read: Sequence[str] | None = None
    writes: Sequence[str] | None = None
    scope: str | None = None
    code: Sequence[str] = ()
    """Digests of what the result depends on besides the parameters."""


Body = PlainBody | Declared
"""What the function under `@operator` may return."""


def on_all_rows(
    function: Callable[[pl.DataFrame], pl.DataFrame],
    columns: Mapping[str, pl.DataType | type[pl.DataType]] | None = None,
) -> FrameFunction:
    """Return a body that calls a function of all rows at once, which sets these columns."""
    return lambda frame: frame.map_batches(
        function, schema={**frame.collect_schema(), **(columns or {})}
    )


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
            return "a function, whose condition cannot be shown"


def evaluate(query: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Run one SELECT over the table `input`; it can reach nothing else.

    >>> evaluate("SELECT sum(x)::INT AS total FROM input", pl.DataFrame({"x": [1, 2]})).rows()
    [(3,)]

    Raises QueryError when it does not parse, or names something that does not exist.
    """
    # Opening a session takes longer than most queries, and a session serves one thread at a time:
    # idle ones are kept. A deque's append and pop are atomic, so no lock is needed.
    console = _take()
    try:
        console.put("input", rows.to_arrow(compat_level=pl.CompatLevel.newest()))
        found = console.sql(query).to_arrow_table()
    except duckdb.Error as error:
        raise query_error(error) from error
    finally:
        # or an idle session would keep the last rows in memory
        console.put("input", _NO_ROWS)
        _idle.append(console)
    return in_utc(pl.DataFrame(pl.from_arrow(found)))


def _take() -> QuerySession:
    with suppress(IndexError):
        return _idle.pop()
    return QuerySession(views=False)


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


# Asked again for each part of a table, and half of what a short query over a part takes.
@lru_cache(maxsize=256)
def _without_rows(
    query: str, columns: tuple[tuple[str, pl.DataType], ...]
) -> tuple[pl.Schema, int]:
    """Return schema and number of the rows that a query makes of none."""
    made = evaluate(query, pl.DataFrame(schema=dict(columns)))
    return made.schema, made.height


def _sql(query: str, frame: pl.LazyFrame) -> pl.LazyFrame:
    schema, _ = _without_rows(query, tuple(frame.collect_schema().items()))
    return frame.map_batches(lambda rows: _as(evaluate(query, rows), schema), schema=schema)


def _value(sql: str, frame: pl.LazyFrame, into: str) -> pl.LazyFrame:
    query = f"SELECT ({sql}\n) AS value FROM input"
    schema = frame.collect_schema()
    made, height = _without_rows(query, tuple(schema.items()))
    kind = made["value"]
    # DuckDB reads `0.5` as a decimal, which no column here is
    if kind.is_decimal():
        kind = pl.Float64()
    if not height:  # an aggregate gives a row of nothing, and is refused below
        # windows and subqueries give the rows in any order
        query = f"SELECT ({sql}\n) AS value, {PLACE} FROM input ORDER BY {PLACE}"

    def add(rows: pl.DataFrame) -> pl.DataFrame:
        placed = rows.with_row_index(PLACE)
        found = evaluate(query, placed)
        if not found.get_column(PLACE, default=pl.Series()).equals(placed[PLACE]):
            raise OperatorError(
                f"`{sql}` gives {found.height} values for {rows.height} rows, expected one a row; "
                "write an aggregate as `avg(x) OVER (PARTITION BY group_id)`"
            )
        return rows.with_columns(found["value"].cast(kind).alias(into))

    return frame.map_batches(add, schema={**schema, into: kind})


def _batches(body: Batches, frame: pl.LazyFrame) -> pl.LazyFrame:
    schema = {**frame.collect_schema(), **body.returned}

    def add(rows: pl.DataFrame) -> pl.DataFrame:
        most = rows.height if body.by_group else BATCH_ROWS
        made = [_one_batch(body, part) for part in rows.iter_slices(max(most, 1))]
        empty = pl.DataFrame(schema=dict(body.returned))
        return rows.with_columns(pl.concat([empty, *made]).get_columns())

    return frame.map_batches(add, schema=schema)


def _rows(body: Rows, frame: pl.LazyFrame) -> pl.LazyFrame:
    schema = {**frame.collect_schema(), **body.columns, ERROR: pl.String()}

    def add(rows: pl.DataFrame) -> pl.DataFrame:
        given = rows.iter_rows(named=True)
        answered = answers(
            body.function, given, max_concurrency=body.max_concurrency, timeout=body.timeout
        )
        errors = [error or _wrong_keys(body, values) for values, error in answered]
        both = zip(answered, errors, strict=True)
        made = [values if values and error is None else {} for (values, _), error in both]
        columns = [
            _column(name, kind, [values.get(name) for values in made], errors)
            for name, kind in body.columns.items()
        ]
        # a row with an error gets no value at all, also where only one of its columns was wrong
        is_right = pl.lit(pl.Series(errors, dtype=pl.String).is_null())
        return rows.with_columns(
            *(pl.when(is_right).then(pl.lit(column)).alias(column.name) for column in columns),
            pl.Series(ERROR, errors, pl.String),
        )

    return frame.map_batches(add, schema=schema)


def _wrong_keys(body: Rows, values: object) -> str | None:
    if isinstance(values, Mapping) and set(values) == set(body.columns):
        return None
    got = sorted(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
    return f"the row function returned {got}, expected exactly {sorted(body.columns)}"


def _column(
    name: str, kind: pl.DataType | type[pl.DataType], values: list[Any], errors: list[str | None]
) -> pl.Series:
    """Return a column of answers; a value of another type becomes the error of its row."""
    with suppress(TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        return pl.Series(name, values, kind, strict=True)
    for i, value in enumerate(values):
        try:
            pl.Series(name, [value], kind, strict=True)
        except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
            values[i] = None
            errors[i] = f"TypeError: `{name}` must be {kind}, got {value!r:.100}"
    return pl.Series(name, values, kind, strict=True)


def _one_batch(body: Batches, part: pl.DataFrame) -> pl.DataFrame:
    [batch] = part.rechunk().to_arrow().to_batches()
    made = body.function(batch)
    if not isinstance(made, pa.RecordBatch):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OperatorError(
            f"a batch function returned a {type(made).__name__}, expected a pyarrow.RecordBatch"
        )
    if made.num_rows != part.height or set(made.schema.names) != set(body.returned):
        raise OperatorError(
            f"a batch function returned {made.num_rows} rows of {sorted(made.schema.names)} for "
            f"{part.height} rows, expected as many rows of {sorted(body.returned)}"
        )
    found = pl.DataFrame(pl.from_arrow(made))
    try:
        return _as(found, body.returned)
    except pl.exceptions.PolarsError as error:
        raise OperatorError(
            f"a batch function returned columns of {dict(found.schema)}, expected "
            f"{dict(body.returned)}: {one_line(error)}"
        ) from error


def by_name(formula: str, *, what: str) -> str:
    """Return an SQL expression in which lists of named values are read as maps.

    In `rewards['format']`, `format` is the name of an entry; an entry that does not exist is NULL.
    A formula that reads entries cannot have window functions.

    >>> by_name("reward + 1", what="formula")
    '(reward + 1\\n)'

    Raises OperatorError, which names the parameter `what`, when the formula does not parse.
    """
    try:
        syntax(f"SELECT ({formula}\n)", what=f"`{what}` {formula!r}")
    except QueryError as error:
        raise OperatorError(str(error)) from error
    sql = f"({formula}\n)"
    for name in NAMED:
        if re.search(rf"\b{name}\s*\[\s*'", formula):
            # the parameter of the function hides the column of the same name
            sql = f"list_transform([map_from_entries({name})], lambda {name}: {sql})[1]"
    return sql
