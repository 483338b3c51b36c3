"""The columns that a SELECT gives, checked by name and type before a row is read, then as rows."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..conversation import CONVERSATION, is_conversation
from ..errors import SchemaError, nearest, shorten
from ..raw_json import dumps, listed
from ..schema import Column, Table
from ..validate import is_text

_TEXT = pa.string()
Kinds = Mapping[str, Any]
"""DuckDB's types, by column."""
JSON_COLUMNS = ("messages", "tools", "metadata", "sampling")
"""Columns that hold JSON text; a SELECT may give them as text, struct or list."""
IMAGE_COLUMNS = ("images", "image")
"""Columns of a file that hold the images of a row, in any shape that `row_images` reads."""
_CASTS = {
    pa.string(): "VARCHAR",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.timestamp("us", "UTC"): "TIMESTAMPTZ",
}


def check_columns(
    declared: Table, allowed: Sequence[Column], given: pa.Schema, kinds: Kinds
) -> None:
    """Raise SchemaError for a column that is not ours, or of a type that ours cannot be made of.

    Of JSON each value tells whether it fits.
    """
    by_name = {c.name: c for c in allowed}
    for field in given:
        if field.name not in by_name:
            hint = nearest(field.name, by_name)
            joint = " Map" if hint.endswith("?") else "; map"
            raise SchemaError(
                f"column `{field.name}` is not a column of `{declared.name}`{hint}"
                f'{joint} the file with `--sql "{select_for(declared.name, given.names)}"`'
            )
        column = by_name[field.name]
        # of images each value tells whether it is one, as of JSON
        if column.name in (*JSON_COLUMNS, *IMAGE_COLUMNS) or is_json(kinds[field.name]):
            continue
        if not _fits(storage(field.type), column.type):
            raise SchemaError(
                f"column `{column.name}` of `{declared.name}` must be {column.type}, got "
                f"{field.type}; {_way_out(column)}"
            )


_OTHER_NAMES = {
    "prompt_text": ("prompt", "question", "problem", "instruction", "query", "input"),
    "answer": ("solution", "ground_truth", "target", "gold", "output", "completion", "response"),
    "response_text": ("response", "completion", "output"),
}
"""What other files call our columns, the most likely first."""


def select_for(name: str, columns: Sequence[str]) -> str:
    """Return the SELECT that maps a file's columns to those of a table, as far as names tell.

    >>> select_for("tasks", ["problem", "solution", "source"])
    'SELECT problem AS prompt_text, solution AS answer FROM input'
    """
    last = "answer" if name == "tasks" else "response_text"
    parts = []
    for ours in ("prompt_text", last):
        found = next((other for other in _OTHER_NAMES[ours] if other in columns), None)
        parts += [ours] if ours in columns else [f"{found} AS {ours}"] if found else []
    return f"SELECT {', '.join(parts if parts[1:] else ['...'])} FROM input"


def _fits(got: pa.DataType, expected: pa.DataType) -> bool:
    if pa.types.is_null(got):
        return True
    return is_text(got) == pa.types.is_string(expected) and _casts(pa.array([], got), expected)


def _casts(values: pa.Array, expected: pa.DataType) -> bool:
    try:
        values.cast(expected)
    except pa.ArrowException:
        return False
    return True


def _way_out(column: Column) -> str:
    if column.type in _CASTS:
        return f"cast it in the SELECT: `{column.name}::{_CASTS[column.type]} AS {column.name}`"
    return "shape it in the SELECT"


def is_json(kind: Any) -> bool:
    """Return whether a type of DuckDB is JSON, which Arrow has as text."""
    return str(kind) == "JSON"


def storage(kind: pa.DataType) -> pa.DataType:
    """Return the type that values of a type are stored as, which extensions only name."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def typed(batch: pa.RecordBatch, allowed: Sequence[Column], kinds: Kinds) -> pa.Table:
    """Return the columns of a batch as declared, JSON columns as text.

    The types do not depend on which rows came in the batch: ids are hashes of what this returns.
    """
    by_name = {c.name: c for c in allowed}
    columns: dict[str, pa.ChunkedArray | pa.Array] = {}
    for name in batch.schema.names:
        values = batch.column(name)
        if isinstance(values, pa.ExtensionArray):
            values = values.storage
        if name in IMAGE_COLUMNS:
            columns[name] = values
        elif name in JSON_COLUMNS:
            columns[name] = pa.array(_json_texts(name, values, kinds[name]), pa.string())
        elif is_json(kinds[name]):
            columns[name] = _said(values.to_pylist(), by_name[name])
        # a batch without values has the type null, and types must not depend on the batch
        elif values.null_count == len(values):
            columns[name] = pa.nulls(len(values), by_name[name].type)
        else:
            columns[name] = _cast(values, by_name[name])
    return pa.table(columns)


def _said(texts: Sequence[str | None], column: Column) -> pa.Array:
    """Return the values of JSON texts as a column."""
    found = [None if text is None else json.loads(text) for text in texts]

    def made(values: Sequence[object]) -> pa.Array | None:
        try:
            array = pa.array(values)
            return array.cast(column.type) if _fits(array.type, column.type) else None
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            return None

    array = made(found)
    if array is None:
        row = next((i for i, value in enumerate(found) if made([value]) is None), 0)
        hint = "; take text with `->>`" if pa.types.is_string(column.type) else ""
        raise RowError(
            row,
            f"column `{column.name}` must be {column.type}, got {short(texts[row])} of JSON{hint}",
        )
    return array


def _cast(values: pa.Array, column: Column) -> pa.Array:
    try:
        return values.cast(column.type)
    except pa.ArrowException:
        row = next(i for i in range(len(values)) if not _casts(values.slice(i, 1), column.type))
        raise RowError(
            row, f"column `{column.name}` must be {column.type}, got {values[row].as_py()!r}"
        ) from None


class RowError(SchemaError):
    """A row of a batch is invalid; the reader of the file knows its row number there."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(row, message)
        self.row, self.message = row, message

    def __str__(self) -> str:
        return self.message


def _json_texts(name: str, values: pa.Array, kind: Any) -> list[str | None]:
    """Return JSON text: text is kept as it is spelled, struct, list or map values are written."""
    are_texts = is_text(values.type)
    texts: list[str | None] = []
    for row, value in enumerate(values.to_pylist()):
        text = value if are_texts or value is None else _written(value, kind)
        text, found = _parsed(text, row, name)
        _check_shape(name, found, row)
        texts.append(text)
    return texts


def _written(value: Any, kind: Any) -> str:
    """Return a struct, list or map as JSON; JSON in it is kept, and keys that are NULL left out."""
    if value is None:
        return "null"
    if is_json(kind):
        return value
    if kind.id in ("struct", "map"):
        given = dict(value)
        of_map = dict.fromkeys(given, kind.children[-1][1])
        kinds = of_map if kind.id == "map" else dict(kind.children)
        parts = ((k, v, kinds[k]) for k, v in given.items() if v is not None)
        return "{" + ", ".join(f"{dumps(str(k))}: {_written(v, t)}" for k, v, t in parts) + "}"
    if kind.id in ("list", "array"):
        return listed([_written(v, kind.children[0][1]) for v in value])
    return dumps(value)


def _parsed(text: str | None, row: int, name: str) -> tuple[str | None, Any]:
    """Return JSON text and its value; of JSON text kept as a JSON string, the inner one."""
    if text is None:
        return None, None
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text, value = value, json.loads(value)
    except ValueError:
        raise RowError(row, f"column `{name}` must be JSON, got {short(text)}") from None
    return (None if value is None else text), value


def plain(value: Any) -> Any:
    """Leave out keys that are NULL: a struct has the keys of all rows, JSON those of its own."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value


def _check_shape(name: str, value: Any, row: int) -> None:
    if value is None:
        return
    if name == "messages":
        check_messages(name, value, row)
    if name in ("metadata", "sampling") and not isinstance(value, dict):
        raise RowError(row, f"column `{name}` must be an object, got {short(value)}")
    if name == "tools" and not isinstance(value, list):
        raise RowError(row, f"column `tools` must be a list, got {short(value)}")


def check_messages(name: str, value: Any, row: int = 0) -> None:
    """Raise RowError for a value that is not a conversation."""
    if not value or not is_conversation(value):
        raise RowError(row, f"column `{name}` must be {CONVERSATION}, got {short(value)}")


def short(value: object) -> str:
    """Return a value as an error shows it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return shorten(text, 60)


def with_column(
    rows: pa.Table, name: str, values: Iterable[object] | pa.Array, kind: pa.DataType
) -> pa.Table:
    """Return the rows with a column set: replaced when it is there, else added."""
    column = values if isinstance(values, pa.Array) else pa.array(list(values), kind)
    if name in rows.column_names:
        return rows.set_column(rows.column_names.index(name), name, column)
    return rows.append_column(name, column)


def values_of(rows: pa.Table, name: str) -> list[Any]:
    """Return a column as Python values, all None when it is not there."""
    return rows.column(name).to_pylist() if name in rows.column_names else [None] * rows.num_rows


def column_of(rows: pa.Table, name: str, kind: pa.DataType = _TEXT) -> pa.Array:
    """Return a column in one piece, all NULL when it is not there."""
    if name not in rows.column_names:
        return pa.nulls(rows.num_rows, kind)
    chunks = rows.column(name).cast(kind).chunks
    return pa.concat_arrays(chunks) if chunks else pa.array([], kind)


def filled(rows: pa.Table, name: str, default: str) -> pa.Array:
    """Return a column of texts with the default where it is NULL or empty."""
    texts = column_of(rows, name)
    return pc.if_else(pc.fill_null(pc.equal(texts, ""), True), default, texts)  # noqa: FBT003
