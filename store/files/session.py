"""A file as the table `input` of a closed DuckDB session, beside the store's tables."""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from ..errors import InputError, QueryError, RlakeError
from ..query import Console, literal, query_error
from ..schema import TABLES
from ..store import Store
from .arrows import Batches, of_arrow, of_sqlite, of_texts
from .formats import Format, Row
from .jsontext import objects

BATCH_BYTES = 8 << 20
"""Rows are handed on in batches of about this size, and of BATCH_ROWS at most."""
BATCH_ROWS = 1024
STEP_ROWS = 64
"""Rows that DuckDB hands out at once: with long ones, that is what a batch may be too large by."""
_JSON = ("jsonl", "json")
_JSON_COLUMNS = ("messages", "tools", "metadata")
_TEXT_COLUMNS = {c.name for t in TABLES.values() for c in t.columns if pa.types.is_string(c.type)}
_CSV_TYPES = (
    "['BOOLEAN', 'BIGINT', 'DOUBLE', 'VARCHAR']"  # dates stay text unless the SELECT casts them
)


@dataclass(frozen=True)
class InputFile:
    """A file that was found readable: where it is, and what people call it."""

    path: Path
    name: str
    kind: str
    format: Format | None = None
    """The named format."""
    skipped: int = 0
    """Lines left out because they do not parse."""
    paths: Sequence[Path] = ()
    """The files of a folder."""


class InputSession(Console):
    """A session that sees `input` and the store's tables, and no other file.

    One thread and joins in the order written: the same file and SELECT give the same rows in the
    same order, so that ids made from positions are the same in a second import. Without a store
    its tables are there, and empty.
    """

    def __init__(self, file: InputFile, store: Store | None) -> None:
        super().__init__()
        self._file = file
        self._source: Batches | None = None
        path = literal(str(file.path.absolute()))
        try:
            self._con.execute("SET threads = 1")
            self._con.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
            self._con.execute(f"CREATE TEMP VIEW input AS {self._reading(path)}")
            self._con.execute(f"SET allowed_paths = [{path}]")
            counted = self._con.execute("SELECT count(*) FROM input").fetchall()
        except duckdb.Error as error:
            raise self.broken(error) from error
        self.num_rows: int = counted[0][0]
        if not self.num_rows:
            raise InputError(f"`{file.name}` has no rows; nothing was imported")
        if store:
            self.show(store.versions(), store.open_at)
        else:
            self.show(dict.fromkeys(TABLES, 0), lambda name, _: TABLES[name].schema.empty_table())

    def select(self, query: str) -> duckdb.DuckDBPyRelation:
        """Return the relation of one SELECT over `input` and the store's tables."""
        try:
            statements = [s.type.name for s in self._con.extract_statements(query)]
            if statements != ["SELECT"]:
                got = " then ".join(statements) or "nothing"
                raise QueryError(f"a file is mapped by one SELECT over `input`, got {got}")
            relation = self._con.sql(query)
        except duckdb.Error as error:
            raise self.refused(error) from error
        assert relation is not None, "a SELECT always has a relation"
        return relation

    def refused(self, error: duckdb.Error) -> RlakeError:
        """Turn what DuckDB says of the SELECT into our kind of error."""
        if isinstance(error, duckdb.PermissionException):
            return QueryError(
                "the SELECT may read `input` and the store's tables, and no other file"
            )
        return query_error(error, "the SELECT over `input`")

    def broken(self, error: duckdb.Error) -> InputError:
        """Turn what DuckDB says of the file into our kind of error."""
        if self._source is not None and self._source.wrong is not None:
            return self._source.wrong
        lines = [line for line in str(error).splitlines() if line.strip()] or ["unreadable"]
        text = re.sub(r"^[\w ]+ Error: ", "", lines[0]).strip().rstrip(".")
        if text.startswith("CSV Error on "):  # the next line repeats the row, the third says why
            place = text.removeprefix("CSV Error on ").replace("Line:", "line")
            text = f"{place}: {_why_csv(lines)}"
        return InputError(
            f"cannot read `{self._file.name}` as {self._file.kind}: {text}; nothing was imported"
        )

    def reader(self, query: str) -> pa.RecordBatchReader:
        """Return the rows of a SELECT, a few at a time."""
        return self.select(query).to_arrow_reader(STEP_ROWS)

    def failed(self, error: duckdb.Error) -> RlakeError:
        """Turn what goes wrong while rows are read into our kind of error."""
        wrong = self._source.wrong if self._source else None
        return wrong or self.refused(error)

    @property
    def columns(self) -> list[str]:
        """The file's columns."""
        return self.select("SELECT * FROM input").columns

    def rows(self) -> Iterator[Row]:
        """Yield the file's rows for a named format: JSON as it is spelled, other values as such."""
        if self._file.kind in _JSON and self._source is not None:
            for batch in self._source.batches():
                for found in batch.to_pylist():
                    yield Row(texts={k: v for k, v in found.items() if v is not None})
            return
        reader = self.reader("SELECT * FROM input")
        numeric = {f.name for f in reader.schema if _is_number(f.type)}
        for batch in reader:
            for found in batch.to_pylist():
                yield Row(found, numbers=numeric)

    def _reading(self, path: str) -> str:
        """Return the SELECT that reads the file; types are inferred from all its rows."""
        kind = self._file.kind
        if kind == "parquet":
            return f"SELECT * FROM read_parquet({path})"
        if kind == "csv":
            return f"SELECT * FROM {self._csv_reader(path)}"
        if kind in _JSON:
            return self._json(path)
        paths = list(self._file.paths) or [self._file.path]
        self._source = of_sqlite(self._file.path) if kind == "sqlite" else of_arrow(paths)
        self._con.register("file_rows", self._source)
        return "SELECT * FROM file_rows"

    def _json(self, path: str) -> str:
        """Let DuckDB tell the types, and give it the values as they are spelled.

        A list of messages read as structs would get the keys of all others, in their order; read
        as DuckDB's JSON, its numbers and its escapes would be written in another way.
        """
        shape = "newline_delimited" if self._file.kind == "jsonl" else "auto"
        # The date format never matches, so that text which looks like a date stays text.
        options = f"format = '{shape}', sample_size = -1"
        inferred = f"{options}, dateformat = '%%', timestampformat = '%%'"
        relation = self._con.sql(f"SELECT * FROM read_json({path}, {inferred})")
        assert relation is not None, "a SELECT always has a relation"
        types = dict(zip(relation.columns, relation.types, strict=True))
        file = self._file  # the source must not hold the session, which holds it
        self._source = of_texts(list(types), lambda: _objects(file))
        self._con.register("file_rows", self._source)
        return f"SELECT {', '.join(_typed(n, t) for n, t in types.items())} FROM file_rows"

    def _csv_reader(self, path: str) -> str:
        names, delimiter = _csv_header(self._file.path)
        options = f"header = true, quote = '\"', escape = '\"', delim = '{delimiter}'"
        # First read as text: types are then inferred from a file that has its columns in each line.
        strict = f"auto_detect = false, columns = {_struct(dict.fromkeys(names, 'VARCHAR'))}"
        self._con.execute(f"SELECT count(*) FROM read_csv({path}, {options}, {strict})").fetchall()
        inferred = f"skip = 0, sample_size = -1, auto_type_candidates = {_CSV_TYPES}"
        types = self._types(f"read_csv({path}, {options}, {inferred})")
        types |= {name: "VARCHAR" for name in types if name in _TEXT_COLUMNS}
        return f"read_csv({path}, {options}, auto_detect = false, columns = {_struct(types)})"

    def _types(self, reader: str) -> dict[str, str]:
        described = self._con.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall()
        types = {str(name): str(kind) for name, kind, *_ in described}
        return types | {name: "TIMESTAMPTZ" for name in types if name == "created_at"}


def _objects(file: InputFile) -> Iterator[str]:
    """Yield the text of each object of a file of JSON."""
    if file.kind == "json":
        yield from objects(file.path)
        return
    with file.path.open(encoding="utf-8", newline="\n") as lines:
        yield from (line for line in lines if line.strip())


def in_batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Put the small batches of a reader together, up to BATCH_BYTES or BATCH_ROWS."""
    kept: list[pa.RecordBatch] = []
    for batch in reader:
        kept.append(batch)
        rows = sum(b.num_rows for b in kept)
        if rows >= BATCH_ROWS or sum(b.nbytes for b in kept) >= BATCH_BYTES:
            yield pa.concat_batches(kept)
            kept = []
    if kept:
        yield pa.concat_batches(kept)


def _typed(name: str, kind: Any) -> str:
    """Return the SQL that makes a value of the inferred type of its JSON text."""
    column = '"' + name.replace('"', '""') + '"'
    if name in _JSON_COLUMNS or kind.id == "json" or str(kind) == "JSON":
        return f"{column}::JSON AS {column}"
    if name == "created_at":
        return f"({column}->>'$')::TIMESTAMPTZ AS {column}"
    if kind.id == "varchar":
        return f"{column}->>'$' AS {column}"
    shape = literal(json.dumps(_shape(kind), ensure_ascii=False))
    return f"from_json({column}, {shape}) AS {column}"


def _shape(kind: Any) -> Any:
    if kind.id == "list":
        return [_shape(kind.children[0][1])]
    if kind.id == "struct":
        return {name: _shape(child) for name, child in kind.children}
    return str(kind)


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)


def _csv_header(path: Path) -> tuple[list[str], str]:
    """Return the column names and the delimiter: that which the first line has most of."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        delimiter = max(",;\t|", key=lines.readline().count)
        lines.seek(0)
        return next(csv.reader(lines, delimiter=delimiter), []), delimiter


def _why_csv(lines: list[str]) -> str:
    why = ("Expected Number", "Value with", "Error when")
    return next((line for line in lines if line.startswith(why)), lines[-1]).strip(" .")


def _struct(types: dict[str, str]) -> str:
    return "{" + ", ".join(f"{literal(n)}: {literal(t)}" for n, t in types.items()) + "}"
