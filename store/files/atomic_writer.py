"""Write files completely or not at all: JSONL, Parquet, Arrow, a Hugging Face dataset."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import ConfigError, InputError, JobError, RlakeError
from ..raw_json import Raw, json_line
from .stale_files import mark, tidy

Line = Mapping[str, Any]
"""One line or row of a file; `Raw` values are JSON text."""

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    "": "hf",
}
"""Kinds of file by suffix; without one, a folder that Hugging Face `datasets` loads from disk."""
_PART = ".rlake-part-"
_DATA = "data-00000-of-00001.arrow"
_AS_TEXT = ("tools",)
"""Columns that stay JSON text in tables, where all rows must have one type."""


def kind_of(path: Path, what: str) -> str:
    """Return the kind of file of a path; raise ConfigError for an unknown suffix or bad folder."""
    if path.suffix not in SUFFIXES:
        known = ", ".join(f"`{s}`" for s in SUFFIXES if s)
        raise ConfigError(
            f"`{what}` is written to {known}, or without a suffix to a folder, got `{path}`"
        )
    kind = SUFFIXES[path.suffix]
    if kind == "hf" and path.exists():
        raise ConfigError(f"cannot write to `{path}`: it exists; name a new folder")
    if path.is_dir() or not path.parent.is_dir():
        where = f"`{path}` is a folder" if path.is_dir() else f"`{path.parent}` does not exist"
        raise ConfigError(f"cannot write to `{path}`: {where}; name a file in a folder that exists")
    return kind


def write_lines(path: Path, chunks: Callable[[], Iterator[list[Line]]], what: str) -> int:
    """Write lines and return how many; a columnar file reads them twice, first for their types."""
    kind = kind_of(path, what)
    if kind != "jsonl":
        schema = _schema(chunks(), path)
        return write_batches(path, schema, (_batch(c, schema) for c in chunks()), what)
    rows = 0
    with whole(path) as part, part.open("w", encoding="utf-8") as out:
        for chunk in chunks():
            out.writelines(json_line(line) + "\n" for line in chunk)
            rows += len(chunk)
        if not rows:
            raise InputError("no rows")
    return rows


def write_batches(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], what: str
) -> int:
    """Write batches to a columnar file or to JSONL, and return the number of rows."""
    kind = kind_of(path, what)
    if kind == "jsonl":
        return write_lines(path, lambda: (b.to_pylist() for b in batches), what)
    rows = 0
    with whole(path) as part, _WRITERS[kind](part, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
        if not rows:
            raise InputError("no rows")
    return rows


class _Writer(Protocol):
    def write_batch(self, batch: pa.RecordBatch, /) -> object: ...


@contextmanager
def _arrow(part: Path, schema: pa.Schema) -> Iterator[_Writer]:
    with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        yield writer


@contextmanager
def _saved(part: Path, schema: pa.Schema) -> Iterator[_Writer]:
    """Write the folder that `Dataset.save_to_disk` of `datasets` 5 writes."""
    part.mkdir()
    with pa.OSFile(str(part / _DATA), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        yield writer
    state = {
        "_data_files": [{"filename": _DATA}],
        "_fingerprint": uuid4().hex[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (part / "state.json").write_text(json.dumps(state, indent=2))
    (part / "dataset_info.json").write_text("{}")


_WRITERS: dict[str, Callable[[Path, pa.Schema], AbstractContextManager[_Writer]]] = {
    "parquet": pq.ParquetWriter,
    "arrow": _arrow,
    "hf": _saved,
}


def _schema(chunks: Iterator[list[Line]], path: Path) -> pa.Schema:
    """Return a schema that fits all lines; raise InputError when there is none."""
    found = pa.schema([])
    try:
        for chunk in chunks:
            columns = {name: pa.array(values).type for name, values in _columns(chunk).items()}
            given = pa.schema(list(columns.items()))
            found = pa.unify_schemas([found, given], promote_options="permissive")
    except pa.ArrowException as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise InputError(
            f"the rows have no types in common, as a table needs ({why}); write to "
            f"`{path.with_suffix('.jsonl').name}`"
        ) from error
    return pa.schema([(f.name, pa.string() if pa.types.is_null(f.type) else f.type) for f in found])


def _batch(chunk: list[Line], schema: pa.Schema) -> pa.RecordBatch:
    columns = _columns(chunk)
    arrays = [pa.array(columns.get(f.name, [None] * len(chunk)), f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _columns(chunk: list[Line]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for line in chunk for name in line)
    return {name: [_value(name, line.get(name)) for line in chunk] for name in names}


def _value(name: str, value: Any) -> Any:
    if not isinstance(value, Raw):
        return value
    return str(value) if name in _AS_TEXT else json.loads(value)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def part_of(path: Path) -> Path:
    """Return the temporary path of a file, and remove those that killed processes left."""
    tidy(path.parent, _PART)
    return path.with_name(f"{_PART}{mark()}.{path.name}")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` when the block succeeds and removed otherwise."""
    part = part_of(path)
    try:
        yield part
        # before the rename: after a crash of the machine, the name could point to missing bytes
        for written in part.iterdir() if part.is_dir() else (part,):
            sync(written)
        part.replace(path)
    except RlakeError:
        raise
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise JobError(f"cannot write `{path}`: {reason}; nothing was written") from error
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        elif part.exists():
            part.unlink()
