"""Rows on disk between being read and being stored: a table is locked only to be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pyarrow as pa

from ..errors import StoreError, reason
from ..schema import TABLES
from .count_sketch import Counts
from .stale_files import temporary_folder

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


class Spool:
    """Tables of rows by name, each a temporary file; written batch by batch, then read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, list[tuple[pa.Schema, pa.ipc.RecordBatchStreamWriter]]] = {}
        self._tasks = Counts()

    def put(self, name: str, rows: pa.Table) -> None:
        """Append rows; those of other columns than the last ones go to a file of their own."""
        written = self._writers.setdefault(name, [])
        try:
            if not written or not written[-1][0].equals(rows.schema):
                path = str(self._folder / f"{name}.{len(written)}")
                made = pa.ipc.new_stream(path, rows.schema, options=_OPTIONS)
                written.append((rows.schema, made))
            written[-1][1].write_table(rows)
        except OSError as error:
            raise _failed(error) from error

    def put_tasks(self, rows: pa.Table) -> None:
        """Append tasks, each once: rows with one id are one task."""
        before = self._tasks.before(rows.column("task_id").to_pylist())
        self.put("tasks", rows.filter(pa.array([n == 0 for n in before])))

    def rows(self, name: str) -> Iterator[pa.Table]:
        """Yield the rows of a name, in order."""
        for number in range(len(self._writers.get(name, ()))):
            path = str(self._folder / f"{name}.{number}")
            with pa.OSFile(path) as file, pa.ipc.open_stream(file) as reader:
                for batch in reader:
                    yield pa.Table.from_batches([batch])

    def close(self) -> None:
        """End the files, so that they can be read."""
        try:
            for _, writer in chain.from_iterable(self._writers.values()):
                writer.close()
        except OSError as error:
            raise _failed(error) from error

    @property
    def tables(self) -> list[str]:
        """The tables that have rows, those first that others refer to."""
        return [name for name in TABLES if name in self._writers]


@contextmanager
def spooled() -> Iterator[Spool]:
    """Give a spool in the system's folder for temporary files, which TMPDIR names."""
    with temporary_folder() as folder:
        yield Spool(folder)


def _failed(error: OSError) -> StoreError:
    why = os.strerror(error.errno) if error.errno else reason(error)
    return StoreError(
        f"cannot write a temporary file: {why}; name a folder with room in TMPDIR; nothing was "
        "stored"
    )
