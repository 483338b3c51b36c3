"""Write a query's rows to standard output as JSON, JSON lines, CSV or Parquet."""

import csv
import io
import os
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from ...store.errors import ConfigError

if TYPE_CHECKING:
    import duckdb

BATCH_ROWS = 1024
"""Rows that are in memory at once."""


def write_rows(relation: "duckdb.DuckDBPyRelation", out: IO[bytes], kind: str) -> None:
    """Write all rows as `json` (a list, a row a line), `jsonl`, `csv` or `parquet`.

    CSV has a header; lists and structs are JSON in it, and NULL is an empty cell. Raises
    ConfigError for Parquet to a terminal.
    """
    if kind == "parquet":
        _write_parquet(relation, out)
        return
    if kind == "jsonl":
        lines = (line + "\n" for line in _json_rows(relation))
    else:
        lines = _json(relation) if kind == "json" else _csv(relation)
    for line in lines:
        out.write(line.encode())
    out.flush()


def _write_parquet(relation: "duckdb.DuckDBPyRelation", out: IO[bytes]) -> None:
    import pyarrow.parquet as pq

    if os.isatty(out.fileno()):
        raise ConfigError("Parquet cannot be shown on a terminal; redirect it: `> rows.parquet`")
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

    for batch in relation.to_arrow_reader(BATCH_ROWS):
        # `strict` would raise for a map that has a key twice; now its last value counts
        yield from map(json_line, batch.to_pylist(maps_as_pydicts="lossy"))


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
