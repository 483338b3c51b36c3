"""Files read batch by batch in Python, as datasets that DuckDB can scan repeatedly."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from ..errors import ConfigError, InputError, nearest
from ..raw_json import members
from .select_columns import storage

BATCH_BYTES = 4 << 20
"""Approximate text size of a batch; a longer line is a batch of its own."""
_ROWS = 1024
_SQLITE_ROWS = 16
_SQLITE_TYPES = {
    "id": pa.int64(),
    "run_id": pa.int64(),
    "model_version": pa.int64(),
    "consumed": pa.int64(),
    "reward": pa.float64(),
    "experience_bytes": pa.binary(),
}


class Batches(ds.Dataset):
    """A dataset whose batches are made again for each scan."""

    def __init__(self, schema: pa.Schema, make: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        # not `super().__init__()`, which raises; DuckDB needs the class and `scanner` only
        self._given, self._make = schema, make
        self.wrong: InputError | None = None
        """The error that ended a scan; DuckDB raises one of its own in its place."""

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self._given

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows from the first on."""
        try:
            yield from self._make()
        except InputError as error:
            self.wrong = error
            raise

    def scanner(self, columns: Any = None, filter: Any = None, **_: Any) -> ds.Scanner:
        """Return a scan, as DuckDB asks for it."""
        return ds.Scanner.from_batches(
            self.batches(), schema=self._given, columns=columns, filter=filter
        )


def of_texts(names: list[str], texts: Callable[[], Iterator[str]], name: str) -> Batches:
    """Return JSON objects as columns of JSON text, each value byte for byte as in the file."""
    schema = pa.schema([(name, pa.string()) for name in names])

    def make() -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, str | None]] = []
        size = 0
        for number, text in enumerate(_as_input_errors(texts(), name), 1):
            try:
                found = members(text, once=True)
            except ValueError as error:
                raise InputError(
                    f"row {number} of `{name}` {error}; nothing was imported"
                ) from error
            # JSON's null becomes NULL, which it means in all our columns.
            rows.append({k: v for k, v in found.items() if v != "null"})
            size += len(text)
            if size >= BATCH_BYTES or len(rows) >= _ROWS:
                yield pa.RecordBatch.from_pylist(rows, schema)
                rows, size = [], 0
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema)

    return Batches(schema, make)


def _as_input_errors(texts: Iterator[str], name: str) -> Iterator[str]:
    """Yield the texts, with ValueError turned into InputError."""
    try:
        yield from texts
    except ValueError as error:
        raise InputError(f"cannot read `{name}`: {error}; nothing was imported") from error


def of_arrow(paths: list[Path]) -> Batches:
    """Return Arrow IPC files or streams in sequence, with one of their batches in memory."""
    schema: pa.Schema | None = None
    for path in paths:
        with _opened(path) as reader:
            if schema is not None and not reader.schema.equals(schema):
                raise InputError(f"`{path}` has other columns than `{paths[0]}`")
            schema = reader.schema
    assert schema is not None, "there is a file"
    plain = pa.schema([pa.field(f.name, storage(f.type)) for f in schema])

    def make() -> Iterator[pa.RecordBatch]:
        for path in paths:
            with _opened(path) as reader:
                for batch in _read(reader, path):
                    for start in range(0, batch.num_rows, _ROWS):
                        yield _plain(batch.slice(start, _ROWS), plain)

    return Batches(plain, make)


def _plain(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [c.storage if isinstance(c, pa.ExtensionArray) else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _opened(path: Path) -> Any:
    """Open an Arrow file or stream, distinguished by its first bytes."""
    try:
        source = pa.OSFile(str(path))
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    except (OSError, pa.ArrowException) as error:
        raise _broken(path, error) from error


def _read(reader: Any, path: Path) -> Iterator[pa.RecordBatch]:
    try:
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)
        else:
            yield from reader
    except (OSError, pa.ArrowException) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> InputError:
    text = str(error).splitlines()[0].strip().rstrip(".")
    return InputError(f"cannot read `{path.name}` as arrow: {text}; nothing was imported")


def saved(folder: Path, split: str | None) -> list[Path]:
    """Return the files of a dataset saved by `datasets`, or of one split of a dataset dict.

    Raises InputError for any other folder, ConfigError for a split that does not exist.
    """
    several = folder / "dataset_dict.json"
    if several.is_file():
        splits = _json(several).get("splits", [])
        if split is None:
            names = ", ".join(f"`{s}`" for s in splits)
            raise ConfigError(f"`{folder}` holds the splits {names}; choose one with `--split`")
        if split not in splits:
            raise ConfigError(f"`{folder}` has no split `{split}`{nearest(split, splits)}")
        return saved(folder / split, None)
    state = folder / "state.json"
    if not state.is_file():
        raise InputError(
            f"`{folder}` is a folder, expected a file, or a dataset saved by Hugging Face "
            "`datasets` with `save_to_disk`: it has no `state.json`"
        )
    paths = [folder / str(f["filename"]) for f in _json(state).get("_data_files", [])]
    for path in paths:
        if not path.is_file():
            raise InputError(f"`{folder}` is incomplete: its file `{path.name}` is missing")
    if not paths:
        raise InputError(f"`{folder}` has no rows; nothing was imported")
    return paths


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"`{path}` is not JSON: {error}") from error


def of_sqlite(path: Path) -> Batches:
    """Return the experiences of a Trinity-RFT buffer: each table that has a blob table.

    Raises InputError when there is none, or the file is broken.
    """
    tables = _sqlite_tables(path)
    metas = {t: c for t, c in tables.items() if f"{t}_blob" in tables}
    if not metas:
        raise InputError(
            f"`{path.name}` is not a buffer of Trinity-RFT: no table has its `_blob` table; it has "
            f"{', '.join(f'`{t}`' for t in tables) or 'none'}"
        )
    names = list(dict.fromkeys(n for columns in metas.values() for n in columns))
    schema = pa.schema(
        [(n, _SQLITE_TYPES.get(n, pa.string())) for n in [*names, "experience_bytes"]]
    )

    def make() -> Iterator[pa.RecordBatch]:
        for table, columns in metas.items():
            listed = ", ".join(f'm."{c}"' for c in columns)
            query = (
                f'SELECT {listed}, b.experience_bytes FROM "{table}" m '
                f'LEFT JOIN "{table}_blob" b USING (id) ORDER BY m.id'
            )
            for rows in _sqlite_rows(path, query):
                named = [dict(zip([*columns, "experience_bytes"], r, strict=True)) for r in rows]
                yield pa.RecordBatch.from_pylist(named, schema)

    return Batches(schema, make)


def _sqlite_tables(path: Path) -> dict[str, list[str]]:
    query = (
        "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c "
        "WHERE m.type = 'table' AND m.name NOT LIKE 'sqlite_%' ORDER BY m.name, c.cid"
    )
    found: dict[str, list[str]] = {}
    for rows in _sqlite_rows(path, query):
        for table, column in rows:
            found.setdefault(table, []).append(column)
    return found


def _sqlite_rows(path: Path, query: str) -> Iterator[list[tuple[Any, ...]]]:
    """Yield rows, a few at a time: a blob may have megabytes."""
    try:
        # read only: nothing of the other program is changed, and no file is made
        con = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            cursor = con.execute(query)
            while rows := cursor.fetchmany(_SQLITE_ROWS):
                yield rows
        finally:
            con.close()
    except sqlite3.Error as error:
        raise InputError(
            f"cannot read `{path.name}` as sqlite: {error}; nothing was imported"
        ) from error
