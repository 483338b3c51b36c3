"""Convert rows of any shape to an Arrow table of the declared columns, or name the bad column."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .errors import SchemaError, nearest, shorten
from .records import Experience, Record, Task, columns_of, now, rows_of
from .schema import CHOICES, PER_TOKEN, TIME, Column, Table

if TYPE_CHECKING:
    import polars as pl

Rows: TypeAlias = (
    "pa.Table | pa.RecordBatch | pl.DataFrame | pl.LazyFrame | Sequence[Mapping[str, Any] | Record]"
)
"""What may be appended."""


def conform(table: Table, data: Rows) -> pa.Table:
    """Return `data` with exactly the columns of `table`, typed as declared.

    Missing columns that may be NULL become NULL, those with a default get it, and a missing or NULL
    `created_at` becomes now. Raises SchemaError for an unknown, missing or mistyped column, NULL
    where a value is required, NaN or infinity, and per-token columns of another length than
    `token_ids`.
    """
    return stamp(check(table, data), now())


def check(table: Table, data: Rows) -> pa.Table:
    """Conform rows like `conform`, but leave a missing `created_at` NULL for `stamp` to fill in."""
    given = _columns(table, data)
    size = len(next(iter(given.values()))) if given else 0
    unknown = [name for name in given if name not in table.names]
    if unknown:
        raise SchemaError(
            f"column `{unknown[0]}` is not a column of `{table.name}`"
            f"{nearest(unknown[0], table.names)}"
        )
    columns = [_column(table, c, given.get(c.name), size) for c in table.columns]
    rows = pa.Table.from_arrays(columns, schema=table.schema)
    if table.name == "experiences":
        _check_experiences(rows)
    return rows


def stamp(rows: pa.Table, first: datetime) -> pa.Table:
    """Fill in the `created_at` that are NULL: `first`, and a microsecond later with each row.

    So `created_at` orders the rows of an append.
    """
    place = rows.schema.get_field_index("created_at")
    times = rows.column(place)
    if not times.null_count:
        return rows
    ticks = np.datetime64(first.replace(tzinfo=None), "us") + np.arange(rows.num_rows)
    filled = pc.coalesce(times, pa.array(ticks, TIME))
    return rows.set_column(place, rows.schema.field(place), filled)


def _columns(table: Table, data: Rows) -> dict[str, Any]:
    """Return the rows as columns: lists for Python rows, Arrow columns for frames."""
    import polars as pl

    frame = data.collect() if isinstance(data, pl.LazyFrame) else data
    given: Any = frame.to_arrow() if isinstance(frame, pl.DataFrame) else frame
    if isinstance(given, pa.RecordBatch):
        given = pa.Table.from_batches([given])
    if isinstance(given, pa.Table):
        return {name: given.column(name) for name in given.column_names}
    given = list(given)
    # `Experience.updated` may have given one row a name of no column.
    if (
        table.name == "experiences"
        and {*map(type, given)} == {Experience}
        and all(vars(one).keys() == vars(given[0]).keys() for one in given)
    ):
        return columns_of(given)
    rows = [_row(table, r) for r in given]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _row(table: Table, row: object) -> Mapping[str, Any]:
    if isinstance(row, Task | Experience):
        return rows_of([row])[0]
    if not isinstance(row, Mapping):
        raise SchemaError(
            f"a row of `{table.name}` must be a mapping or a record, got {type(row).__name__}"
        )
    return row


def _column(table: Table, column: Column, given: Any, size: int) -> pa.ChunkedArray:
    if given is None:
        values = pa.chunked_array([pa.nulls(size, column.type)])
        if not column.required:
            return values
    else:
        values = _typed(table, column, given)
    if column.default is not None:
        values = pc.fill_null(values, column.default)
    # `stamp` sets `created_at` later, under the table's lock
    if column.required and column.name != "created_at" and values.null_count:
        where = "is missing" if given is None else f"is NULL in {values.null_count} of {size} rows"
        raise SchemaError(
            f"column `{column.name}` of `{table.name}` {where}; every row must have it"
        )
    _check_finite(table, column, values)
    return values


def _typed(table: Table, column: Column, given: Any) -> pa.ChunkedArray:
    try:
        if isinstance(given, pa.ChunkedArray | pa.Array):
            if given.type == column.type:
                values = given
            else:
                _refuse_lossy(given.type, column.type)
                values = given.cast(column.type)
        elif _infers(column.type):
            # inferred first: given the type, pyarrow silently truncates 1.5 to 1 and drops fields
            values = pa.array(given)
            _refuse_lossy(values.type, column.type)
            values = values.cast(column.type)
        else:
            values = pa.array(given, column.type)
    except (pa.ArrowException, OverflowError) as error:
        is_array = isinstance(given, pa.ChunkedArray | pa.Array)
        got = given.type if is_array else _first_wrong(column, given)
        raise SchemaError(
            f"column `{column.name}` of `{table.name}` must be {column.type}, got {got}; "
            f"cast it first ({str(error).splitlines()[0]})"
        ) from error
    return values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])


def _refuse_lossy(got: pa.DataType, expected: pa.DataType) -> None:
    """Refuse casts that Arrow allows but that are mistakes, also within lists and structs."""
    if pa.types.is_struct(expected) and pa.types.is_struct(got):
        for field in got.fields:
            if expected.get_field_index(field.name) < 0:
                raise pa.ArrowTypeError(f"unknown field `{field.name}`")
            _refuse_lossy(field.type, expected.field(field.name).type)
        return
    if _is_list(got) and _is_list(expected):
        _refuse_lossy(got.value_type, expected.value_type)
        return
    if pa.types.is_null(got):
        return
    if is_text(got) != is_text(expected):
        raise pa.ArrowTypeError("text and other types are not cast into each other")
    # a truth value as a number is 0 or 1; as a count, or the other way round, it is a mistake
    truths = pa.types.is_boolean(got), pa.types.is_boolean(expected)
    if truths[0] != truths[1] and not pa.types.is_floating(expected):
        raise pa.ArrowTypeError("truth values and numbers are not cast into each other")


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is text, in any of Arrow's representations."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    types = pa.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _infers(kind: pa.DataType) -> bool:
    leaf = kind
    while _is_list(leaf):
        leaf = leaf.value_type
    return pa.types.is_integer(leaf) or pa.types.is_struct(leaf)


def _first_wrong(column: Column, values: Iterable[Any]) -> str:
    """Describe the first value that does not fit, with its row."""
    for i, value in enumerate(values):
        try:
            made = pa.array([value])
            _refuse_lossy(made.type, column.type)
            made.cast(column.type)
            pa.array([value], column.type)
        except (pa.ArrowException, OverflowError, TypeError):
            return f"{shorten(repr(value), 100)} ({type(value).__name__}) in row {i}"
    return "values of several types"


def _check_finite(table: Table, column: Column, values: pa.ChunkedArray) -> None:
    floats = values
    if _is_list(column.type):
        floats = pc.list_flatten(values)
        if pa.types.is_struct(floats.type) and floats.type.get_field_index("value") >= 0:
            floats = pc.struct_field(floats, "value")
    if not pa.types.is_floating(floats.type):
        return
    # one NaN would spread: to the mean of its group, to the loss, and to all weights
    if len(floats) and not pc.all(pc.is_finite(floats), min_count=0).as_py():
        where = ""
        if floats is values:
            bad = pc.index(pc.fill_null(pc.is_finite(values), True), False).as_py()  # noqa: FBT003
            where = f" in row {bad}"
        raise SchemaError(
            f"column `{column.name}` of `{table.name}` holds NaN or infinity{where}, expected a "
            "finite number; use NULL for what was not computed"
        )


def _check_experiences(rows: pa.Table) -> None:
    tokens = pc.list_value_length(rows.column("token_ids"))
    given = [n for n in ("token_ids", *PER_TOKEN) if rows.column(n).null_count < rows.num_rows]
    for name in given:
        if pc.list_flatten(rows.column(name)).null_count:
            raise SchemaError(
                f"column `{name}` of `experiences` holds NULL among its values, expected one value "
                "for each token; leave the whole list NULL when it was not computed"
            )
    message = rows.column("num_tokens")
    bad = pc.index(pc.not_equal(message, tokens), True).as_py()
    if bad >= 0:
        raise SchemaError(
            f"column `num_tokens` of `experiences` is {message[bad]} in row {bad}, but `token_ids` "
            f"has {tokens[bad]}; leave it out, or count them"
        )
    for name in (n for n in given if n != "token_ids"):
        lengths = pc.list_value_length(rows.column(name))
        # A list that is NULL was not computed, which every row is allowed.
        differs = pc.fill_null(pc.not_equal(lengths, tokens), False)  # noqa: FBT003
        # Values for each token mean nothing in a row that has no tokens.
        alone = pc.and_(pc.is_valid(lengths), pc.is_null(tokens))
        bad = pc.index(pc.or_(differs, alone), True).as_py()
        if bad >= 0:
            raise SchemaError(
                f"column `{name}` of `experiences` has {lengths[bad]} values in row {bad}, "
                f"expected {tokens[bad]}: one for each of `token_ids`, prompt included"
            )
    for name, choices in CHOICES.items():
        for value in pc.unique(rows.column(name)).to_pylist():
            if value not in choices:
                raise SchemaError(
                    f"column `{name}` of `experiences` holds {value!r}{nearest(value, choices)}"
                )
    # draws look up a random number in the running sum of priorities, which must not fall
    if (pc.min(rows.column("priority")).as_py() or 0.0) < 0:
        raise SchemaError(
            "column `priority` of `experiences` holds a negative number, expected 0 or more"
        )
