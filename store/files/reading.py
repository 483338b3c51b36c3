"""A file as the table `input` of a closed DuckDB session: JSONL, JSON, CSV or Parquet."""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import pyarrow as pa

from ..errors import ConfigError, InputError, QueryError, nearest
from ..query import Console, literal, query_error
from ..schema import TABLES
from ..store import Store

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
"""Kinds of file by suffix."""

FORMATS: dict[str, dict[str, str]] = {
    "gsm8k": {
        "tasks": "SELECT question AS prompt_text, answer FROM input",
        "experiences": "SELECT question AS prompt_text, answer, answer AS response_text, "
        "1.0 AS reward, 'expert' AS source FROM input",
    },
    "chat": {
        "tasks": "SELECT CASE WHEN m->>'$[#-1].role' = 'assistant' "
        "THEN to_json((m->'$[*]')[:-2]) ELSE m END AS messages, "
        "CASE WHEN m->>'$[#-1].role' = 'assistant' THEN m->>'$[#-1].content' END AS answer "
        "FROM (SELECT to_json(messages) AS m FROM input)",
        "experiences": "SELECT messages FROM input",
    },
}
"""Well-known formats: the SELECT over `input` for each table that they fill."""

BATCH_ROWS = 1024
_JSON_COLUMNS = ("messages", "tools", "metadata")
_TEXT_COLUMNS = {c.name for t in TABLES.values() for c in t.columns if pa.types.is_string(c.type)}
_CSV_TYPES = (
    "['BOOLEAN', 'BIGINT', 'DOUBLE', 'VARCHAR']"  # dates stay text unless the SELECT casts them
)


@dataclass(frozen=True)
class InputFile:
    """A file that was found readable: what DuckDB reads, and what people call it."""

    path: Path
    name: str
    kind: str
    mapping: str | None = None
    """The named format, which has a SELECT of its own."""
    skipped: int = 0
    """Lines left out because they do not parse."""


@contextmanager
def open_input(
    path: str | Path, *, format: str | None = None, skip_bad: bool = False
) -> Iterator[InputFile]:
    """Look at a file before anything is imported.

    `format` is a kind of file (jsonl, json, csv, parquet) or one of FORMATS; the suffix tells the
    kind otherwise. With `skip_bad`, lines of JSONL that do not parse are left out and counted.

    Raises InputError for a file that is missing, empty or broken, ConfigError for an unknown
    format.

    >>> path = tmp / "tasks.jsonl"
    >>> _ = path.write_text('{"prompt_text": "1+1=", "answer": "2"}')
    >>> with open_input(path) as file:
    ...     file.kind
    'jsonl'
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder, expected a file" if path.is_dir() else "does not exist"
        raise InputError(f"`{path}` {what}")
    kind, mapping = _kind(path, format)
    try:
        if not path.stat().st_size:
            raise InputError(f"`{path}` is empty; nothing was imported")
        if skip_bad and kind != "jsonl":
            raise ConfigError(f"`--skip-bad` leaves out lines of jsonl files, got a {kind} file")
        bad = dict(_bad_lines(path)) if kind == "jsonl" else {}
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from error
    if bad and not skip_bad:
        line, reason = next(iter(bad.items()))
        more = f" ({len(bad)} such lines)" if len(bad) > 1 else ""
        raise InputError(
            f"`{path}` line {line} {reason}{more}; nothing was imported; mend the file, or leave "
            "such lines out with `--skip-bad`"
        )
    if not bad:
        yield InputFile(path, path.name, kind, mapping)
        return
    with TemporaryDirectory(prefix="rlake-import-") as folder:
        clean = _without(path, set(bad), Path(folder) / "input.jsonl")
        yield InputFile(clean, path.name, kind, mapping, len(bad))


def _kind(path: Path, format: str | None) -> tuple[str, str | None]:
    """Return the kind of file, and the named format if it is one."""
    kinds = sorted(set(KINDS.values()))
    if format is not None and format not in kinds and format not in FORMATS:
        raise ConfigError(f"there is no format `{format}`{nearest(format, [*kinds, *FORMATS])}")
    if format in kinds:
        return format, None
    kind = KINDS.get(path.suffix.lower(), "jsonl" if format in FORMATS else None)
    if kind is None:
        raise InputError(
            f"cannot tell what kind of file `{path}` is, expected one of {', '.join(KINDS)}; "
            "say so with `--format`"
        )
    return kind, format


def _bad_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number of each line that is not a JSON object, and why."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            reason = _why_bad(line) if line.strip() else None
            if reason:
                yield number, reason


def _why_bad(line: bytes) -> str | None:
    if line.startswith(codecs.BOM_UTF8):
        return "starts with a byte order mark, expected UTF-8 without one"
    try:
        value = json.loads(line.decode())
        if b"\\ud" in line.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg[0].lower()}{error.msg[1:]} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"is not UTF-8 at byte {error.start + 1}"
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which is no text"
    except RecursionError:
        return "is nested too deeply"
    return (
        None if isinstance(value, dict) else f"is a JSON {type(value).__name__}, expected an object"
    )


def _without(path: Path, bad: set[int], clean: Path) -> Path:
    with path.open("rb") as lines, clean.open("wb") as out:
        out.writelines(line for number, line in enumerate(lines, 1) if number not in bad)
    return clean


class InputSession(Console):
    """A session that sees `input` and the store's tables, and no other file.

    One thread and joins in the order written: the same file and SELECT give the same rows in the
    same order, so that ids made from positions are the same in a second import. Without a store
    its tables are there, and empty.
    """

    def __init__(self, file: InputFile, store: Store | None) -> None:
        super().__init__()
        self._file = file
        path = literal(str(file.path.absolute()))
        try:
            self._con.execute("SET threads = 1")
            self._con.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
            self._con.execute(f"CREATE TEMP VIEW input AS SELECT * FROM {self._reader(path)}")
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

    def refused(self, error: duckdb.Error) -> QueryError:
        """Turn what DuckDB says of the SELECT into our kind of error."""
        if isinstance(error, duckdb.PermissionException):
            return QueryError(
                "the SELECT may read `input` and the store's tables, and no other file"
            )
        return query_error(error, "the SELECT over `input`")

    def broken(self, error: duckdb.Error) -> InputError:
        """Turn what DuckDB says of the file into our kind of error."""
        lines = [line for line in str(error).splitlines() if line.strip()] or ["unreadable"]
        text = re.sub(r"^[\w ]+ Error: ", "", lines[0]).strip().rstrip(".")
        if text.startswith("CSV Error on "):  # the next line repeats the row, the third says why
            place = text.removeprefix("CSV Error on ").replace("Line:", "line")
            text = f"{place}: {_why_csv(lines)}"
        return InputError(
            f"cannot read `{self._file.name}` as {self._file.kind}: {text}; nothing was imported"
        )

    def _reader(self, path: str) -> str:
        """Return the table function that reads the file; types are inferred from all its rows."""
        if self._file.kind == "parquet":
            return f"read_parquet({path})"
        if self._file.kind == "csv":
            return self._csv_reader(path)
        shape = "newline_delimited" if self._file.kind == "jsonl" else "auto"
        # The date format never matches, so that text which looks like a date stays text.
        options = f"format = '{shape}'"
        inferred = f"{options}, sample_size = -1, dateformat = '%%', timestampformat = '%%'"
        types = self._types(f"read_json({path}, {inferred})")
        # JSON is kept as it stands: as a struct, each message would get the keys of all others.
        types |= {name: "JSON" for name in _JSON_COLUMNS if name in types}
        return f"read_json({path}, {options}, columns = {_struct(types)})"

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
