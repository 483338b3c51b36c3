"""A file as the table `input` of a sandboxed DuckDB session with the store's tables."""

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from ..errors import InputError, QueryError, RlakeError
from ..query import QuerySession, literal, query_error, quoted
from ..raw_json import objects
from ..schema import TABLES
from ..store import Store
from .arrow_source import Batches, of_arrow, of_sqlite, of_texts
from .compression import inner_name
from .formats import Format, Row
from .json_columns import holds_objects, in_parts, teach, typed
from .json_lines import are_plain, may_be_long, reading, struct
from .rejected_rows import Rejected
from .select_columns import JSON_COLUMNS

BATCH_BYTES = 8 << 20
"""Approximate size of a batch, which has at most BATCH_ROWS rows."""
BATCH_ROWS = 8192
STEP_ROWS = 64
"""Rows that DuckDB returns at once, by which a batch may exceed BATCH_BYTES."""
_JSON = ("jsonl", "json")
_TEXT_COLUMNS = {c.name for t in TABLES.values() for c in t.columns if pa.types.is_string(c.type)}
_NUMBERS = {c.name for t in TABLES.values() for c in t.columns if pa.types.is_floating(c.type)}
"""Our float columns, whose numbers may be written as integers in a file."""
_CSV_TYPES = (
    "['BOOLEAN', 'BIGINT', 'DOUBLE', 'VARCHAR']"  # dates stay text unless the SELECT casts them
)


_CODE = r"^[+-]?(0\d|\d{19,}$)"


@dataclass(frozen=True)
class InputFile:
    """A readable file: its path, and its name in messages."""

    path: Path
    name: str
    kind: str
    format: Format | None = None
    """The named format."""
    rejected: Rejected | None = None
    """Collects invalid lines and rows, if those are to be skipped."""
    paths: Sequence[Path] = ()
    """The files of a folder."""
    folder: Path | None = None
    """Where paths of images in it begin; None: they are not read."""
    taskset: str | None = None
    """The default name of its taskset; None: by its name."""

    @property
    def stem(self) -> str:
        """Its name without suffixes, the default name of its taskset."""
        return self.taskset or Path(inner_name(self.name)).stem


class InputSession(QuerySession):
    """A session that can read `input` and the store's tables, and no other file.

    It runs on one thread, with joins in the written order: the same file and SELECT give the same
    rows in the same order, so that ids made from positions are the same in a second import. Without
    a store, its tables are empty. With `spelled`, objects of a JSON file stay JSON text byte for
    byte, for rows that are stored; otherwise they are structs, for rows that are computed with.
    """

    def __init__(self, file: InputFile, store: Store | None, *, spelled: bool = False) -> None:
        super().__init__(shared=False)
        self._file, self._spelled = file, spelled
        self._json_columns: set[str] = set()
        self._is_taught = False
        self._source: Batches | None = None
        own = str(file.path.absolute())
        path = literal(re.sub(r"([*?\[])", r"[\1]", own))  # DuckDB takes it as a glob pattern
        try:
            self._con.execute("SET threads = 1")
            self._con.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
            self._con.execute(f"CREATE TEMP VIEW input AS {self._reading(path)}")
            # set after the view is created: a SELECT can read only this file
            self._con.execute(f"SET allowed_paths = [{path}, {literal(own)}]")
            self._lock()
            self.num_rows = self._counted()
        except duckdb.Error as error:
            raise self.broken(error) from error
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
            self._open_for(query)
            relation = self._con.sql(self._in_parts(query))
        except duckdb.Error as error:
            raise self.refused(error) from error
        assert relation is not None, "a SELECT always has a relation"
        return relation

    def _in_parts(self, query: str) -> str:
        """Rewrite the SELECT so that parts of JSON stay byte for byte."""
        if not (self._spelled and self._json_columns):
            return query
        made = in_parts(self._con, query, self._json_columns)
        if made != query and not self._is_taught:
            teach(self._con)
            self._is_taught = True
        return made

    def refused(self, error: duckdb.Error) -> RlakeError:
        """Turn an error of DuckDB about the SELECT into one of ours."""
        if isinstance(error, duckdb.PermissionException):
            return QueryError(
                "the SELECT may read `input` and the store's tables, and no other file"
            )
        return query_error(error, "the SELECT over `input`")

    def broken(self, error: duckdb.Error) -> InputError:
        """Turn an error of DuckDB about the file into InputError."""
        if (wrong := self._wrong(error)) is not None:
            return wrong
        lines = [line for line in str(error).splitlines() if line.strip()] or ["unreadable"]
        text = re.sub(r"^[\w ]+ Error: ", "", lines[0]).strip().rstrip(".")
        if text.startswith("CSV Error on "):  # the next line repeats the row, the third says why
            place = text.removeprefix("CSV Error on ").replace("Line:", "line")
            text = f"{place}: {_why_csv(lines)}"
        return InputError(
            f"cannot read `{self._file.name}` as {self._file.kind}: {text}; nothing was imported"
        )

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a SELECT; raises QueryError or InputError where one cannot be read."""
        with self.select(query).to_arrow_reader(STEP_ROWS) as reader:
            try:
                yield from reader
            except OSError as error:  # Arrow's, with the text of DuckDB's
                raise self.failed(duckdb.Error(str(error))) from error

    def failed(self, error: duckdb.Error) -> RlakeError:
        """Turn an error while reading rows into one of ours."""
        return self._wrong(error) or self.refused(error)

    def _wrong(self, error: duckdb.Error) -> InputError | None:
        """Return what is wrong with a text of the file, whose row DuckDB does not know."""
        if self._source is not None and self._file.kind == "jsonl" and "JSON" in str(error):
            with suppress(InputError):
                deque(self._source.batches(), maxlen=0)
        return self._source.wrong if self._source is not None else None

    def _counted(self) -> int:
        if self._file.kind == "jsonl":
            return sum(1 for _ in _objects(self._file))
        return self._con.execute("SELECT count(*) FROM input").fetchall()[0][0]

    @property
    def columns(self) -> list[str]:
        """The file's columns."""
        return self.select("SELECT * FROM input").columns

    def rows(self) -> Iterator[Row]:
        """Yield the file's rows for a named format: JSON byte for byte, other values as Python."""
        # not through DuckDB, which would reformat numbers and escapes
        if self._file.kind in _JSON and self._source is not None:
            for batch in self._source.batches():
                for found in batch.to_pylist():
                    yield Row(texts={k: v for k, v in found.items() if v is not None})
            return
        for batch in self.batches("SELECT * FROM input"):
            numeric = {f.name for f in batch.schema if _is_number(f.type)}
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
        """Infer types with DuckDB, but provide the values byte for byte.

        Messages read as structs would get the keys of all other messages, in their order; read as
        DuckDB's JSON, their numbers and escapes would be reformatted.
        """
        shape = "newline_delimited" if self._file.kind == "jsonl" else "auto"
        # The date format never matches, so that text which looks like a date stays text.
        options = f"format = '{shape}', sample_size = -1"
        inferred = f"{options}, dateformat = '%%', timestampformat = '%%'"
        relation = self._con.sql(f"SELECT * FROM read_json({path}, {inferred})")
        assert relation is not None, "a SELECT always has a relation"
        types = dict(zip(relation.columns, relation.types, strict=True))
        file = self._file  # the source must not hold the session, which holds it
        self._source = of_texts(list(types), lambda: _objects(file), file.name)
        self._con.register("file_rows", self._source)
        self._json_columns = {n for n, t in types.items() if self._is_json(n, t, path)}
        is_spelled = self._file.kind == "json" or self._json_columns
        if not is_spelled and are_plain(self._con, path, types):
            return f"SELECT * FROM {reading(path, types)}"
        parts = (typed(n, t, as_json=n in self._json_columns) for n, t in types.items())
        return f"SELECT {', '.join(parts)} FROM file_rows"

    def _is_json(self, name: str, kind: Any, path: str) -> bool:
        """Return whether a column stays JSON text."""
        if name in JSON_COLUMNS or str(kind) == "JSON":
            return True
        return self._spelled and (holds_objects(name, kind) or self._has_long(name, kind, path))

    def _has_long(self, name: str, kind: Any, path: str) -> bool:
        """Return whether there are integers that a float would round."""
        if kind.id != "double" or name in _NUMBERS:
            return False
        if self._file.kind == "jsonl" and not may_be_long(self._con, path, name):
            return False
        long = f"SELECT bool_or(regexp_full_match({quoted(name)}, '-?\\d{{16,}}')) FROM file_rows"
        return bool(self._con.execute(long).fetchall()[0][0])

    def _csv_reader(self, path: str) -> str:
        names, delimiter = _csv_header(self._file.path)
        options = f"header = true, quote = '\"', escape = '\"', delim = '{delimiter}'"
        # First as text, which checks the number of columns of each line before types are inferred.
        strict = f"auto_detect = false, columns = {struct(dict.fromkeys(names, 'VARCHAR'))}"
        as_text = f"SELECT {_codes(names)} FROM read_csv({path}, {options}, {strict})"
        codes = self._con.execute(as_text).fetchall()[0]
        inferred = f"skip = 0, sample_size = -1, auto_type_candidates = {_CSV_TYPES}"
        types = self._types(f"read_csv({path}, {options}, {inferred})")
        texts = {name for name, is_code in zip(names, codes, strict=True) if is_code}
        types |= {name: "VARCHAR" for name in types if name in _TEXT_COLUMNS | texts}
        return f"read_csv({path}, {options}, auto_detect = false, columns = {struct(types)})"

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


def in_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Combine small batches, up to BATCH_BYTES or BATCH_ROWS."""
    kept: list[pa.RecordBatch] = []
    rows = nbytes = 0
    for batch in batches:
        kept.append(batch)
        rows, nbytes = rows + batch.num_rows, nbytes + batch.nbytes
        if rows >= BATCH_ROWS or nbytes >= BATCH_BYTES:
            yield pa.concat_batches(kept)
            kept, rows, nbytes = [], 0, 0
    if kept:
        yield pa.concat_batches(kept)


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)


def _csv_header(path: Path) -> tuple[list[str], str]:
    """Return the column names and the delimiter, the most frequent one in the first line."""
    # `replace`, since this only finds the header: DuckDB reports where a file is not UTF-8.
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        delimiter = max(",;\t|", key=lines.readline().count)
        lines.seek(0)
        return next(csv.reader(lines, delimiter=delimiter), []), delimiter


def _codes(names: list[str]) -> str:
    """Return the SQL that finds columns of codes that numbers would corrupt: 007, or 2 ** 64."""
    return ", ".join(f"bool_or(regexp_matches({quoted(n)}, '{_CODE}'))" for n in names)


def _why_csv(lines: list[str]) -> str:
    why = ("Expected Number", "Value with", "Error when")
    return next((line for line in lines if line.startswith(why)), lines[-1]).strip(" .")
