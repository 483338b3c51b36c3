"""Write a query's rows as a table, JSON, JSON lines, CSV, Parquet, Markdown or lines."""

import csv
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from ...store.errors import ConfigError, QueryError
from .tables import counted, print_rows, screen

if TYPE_CHECKING:
    import duckdb

BATCH_ROWS = 1024
"""Rows that are in memory at once."""


def write_rows(relation: "duckdb.DuckDBPyRelation", out: IO[bytes], kind: str) -> None:
    """Write all rows as json (a list, a row a line), jsonl, csv, markdown, line or parquet.

    CSV has a header; lists and structs are JSON in it, and NULL is an empty cell. Raises
    ConfigError for Parquet to a terminal.
    """
    if kind == "parquet":
        _write_parquet(relation, out)
        return
    if kind == "jsonl":
        lines = (line + "\n" for line in _json_rows(relation))
    else:
        lines = _WRITERS[kind](relation)
    for line in lines:
        out.write(line.encode())
    out.flush()


def _write_parquet(relation: "duckdb.DuckDBPyRelation", out: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    if os.isatty(out.fileno()):
        raise ConfigError(
            "Parquet cannot be shown on a terminal; redirect it: `> rows.parquet`; "
            "in the console, `.output FILE`"
        )
    # Each batch becomes a row group, and small ones make a file that is large and slow to read.
    reader = relation.to_arrow_reader(BATCH_ROWS * 64)
    with (
        os.fdopen(os.dup(out.fileno()), "wb") as copy,  # Arrow closes what it was given
        pq.ParquetWriter(copy, reader.schema) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)


def _json(relation: "duckdb.DuckDBPyRelation") -> Iterator[str]:
    before = "["
    for line in _json_rows(relation):
        yield before + ("\n" if before == "[" else "") + line
        before = ",\n"
    # No row has opened the list.
    yield "[]\n" if before == "[" else "\n]\n"


def _json_rows(relation: "duckdb.DuckDBPyRelation") -> Iterator[str]:
    from ...store.raw_json import json_line

    names = relation.columns
    # an object would keep the last of them
    if twice := [name for name in names if names.count(name) > 1]:
        raise QueryError(
            f"two columns are called `{twice[0]}`, which JSON cannot show; name them with `AS`"
        )
    for batch in relation.to_arrow_reader(BATCH_ROWS):
        # `strict` would raise for a map that has a key twice; now its last value counts
        yield from map(json_line, batch.to_pylist(maps_as_pydicts="lossy"))


def print_table(relation: "duckdb.DuckDBPyRelation", rows: int, *, more: str) -> None:
    """Print the first rows as a table; `more` says how to see the others."""
    columns = relation.columns
    # One more than shown tells whether there are more, without counting them all.
    found = list(itertools.islice(_rows(relation), rows + 1))
    # The plan is a drawing, which the cells of a table would break.
    if columns == ["explain_key", "explain_value"]:
        print(*(value for _, value in found), sep="\n")
        return
    print_rows(columns, found[:rows])
    note = counted(len(found), "row")
    if len(found) > rows:
        note = f"first {counted(rows, 'row')}; {more}"
    screen().print(f"({note})", style="dim")


def _rows(relation: "duckdb.DuckDBPyRelation") -> Iterator[tuple[Any, ...]]:
    """Yield rows as tuples, since two columns may have one name."""
    for batch in relation.to_arrow_reader(BATCH_ROWS):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _markdown(relation: "duckdb.DuckDBPyRelation") -> Iterator[str]:
    yield _markdown_line(relation.columns)
    sides = ("---:" if kind.id in _NUMBERS else "---" for kind in relation.types)
    yield f"|{'|'.join(sides)}|\n"
    yield from map(_markdown_line, _rows(relation))


def _markdown_line(values: Sequence[Any]) -> str:
    # a row is a line, and a bar ends a cell
    cells = (" ".join(_text(v).replace("|", "\\|").split()) for v in values)
    return f"| {' | '.join(cells)} |\n"


def _line(relation: "duckdb.DuckDBPyRelation") -> Iterator[str]:
    names = relation.columns
    width = max(map(len, names))
    for row in _rows(relation):
        yield (
            "".join(f"{n:>{width}} = {_text(v)}\n" for n, v in zip(names, row, strict=True)) + "\n"
        )


def _text(value: Any) -> str:
    return "NULL" if value is None else str(_cell(value))


def _csv(relation: "duckdb.DuckDBPyRelation") -> Iterator[str]:
    yield _csv_lines([relation.columns])
    for batch in relation.to_arrow_reader(BATCH_ROWS):
        columns = (column.to_pylist() for column in batch.columns)
        yield _csv_lines(zip(*columns, strict=True))


def _csv_lines(rows: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(v) for v in row] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    from datetime import date, datetime, time

    from ...store.raw_json import json_text

    if isinstance(value, datetime | date | time):
        # As JSON has it; `str` would write a space between date and time.
        return value.isoformat()
    return json_text(value) if isinstance(value, list | dict) else value


_WRITERS = {"json": _json, "csv": _csv, "markdown": _markdown, "line": _line}
_NUMBERS = {"tinyint", "smallint", "integer", "bigint", "hugeint", "utinyint", "usmallint"}
_NUMBERS |= {"uinteger", "ubigint", "uhugeint", "float", "double", "decimal"}
