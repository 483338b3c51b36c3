"""Spool rows on disk between reading and storing, so that tables are locked only briefly."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pyarrow as pa

from ..errors import no_room
from ..schema import TABLES
from .stale_files import temporary_folder
from .text_numbers import Counts

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


class Spool:
    """Rows by table name in temporary files; written batch by batch, then read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, list[tuple[pa.Schema, pa.ipc.RecordBatchStreamWriter]]] = {}
        self._tasks = Counts()

    def put(self, name: str, rows: pa.Table) -> None:
        """Append rows; a change of columns starts a new file."""
        written = self._writers.setdefault(name, [])
        try:
            # files of one import may have different columns, and an Arrow stream has one schema
            if not written or not written[-1][0].equals(rows.schema):
                path = str(self._folder / f"{name}.{len(written)}")
                made = pa.ipc.new_stream(path, rows.schema, options=_OPTIONS)
                written.append((rows.schema, made))
            written[-1][1].write_table(rows)
        except OSError as error:
            raise no_room(error, "; nothing was stored") from error

    def put_tasks(self, rows: pa.Table) -> None:
        """Append tasks without repeating ids."""
        before = self._tasks.before(rows.column("task_id"))
        self.put("tasks", rows.filter(pa.array(before == 0)))

    def rows(self, name: str) -> Iterator[pa.Table]:
        """Yield the rows of a name, in order."""
        for number in range(len(self._writers.get(name, ()))):
            path = str(self._folder / f"{name}.{number}")
            with pa.OSFile(path) as file, pa.ipc.open_stream(file) as reader:
                for batch in reader:
                    yield pa.Table.from_batches([batch])

    def close(self) -> None:
        """Finish the files, so that they can be read."""
        try:
            for _, writer in chain.from_iterable(self._writers.values()):
                writer.close()
        except OSError as error:
            raise no_room(error, "; nothing was stored") from error

    @property
    def tables(self) -> list[str]:
        """The tables that have rows, referenced tables first."""
        return [name for name in ("media", *TABLES) if name in self._writers]


@contextmanager
def spooled() -> Iterator[Spool]:
    """Yield a spool in the system's folder for temporary files (TMPDIR)."""
    with temporary_folder() as folder:
        yield Spool(folder)
