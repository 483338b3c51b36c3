"""Rows between two stages, in memory while they are few, else in temporary files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl

from ...store.errors import no_room

CHUNK_BYTES = 8 << 20
"""Size of a chunk, which is one file and is read as a whole."""
MEMORY_BYTES = 32 << 20
"""Most bytes of rows in memory; more are written to files."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows, in memory or in a file."""

    rows: int
    num_bytes: int
    frame: pl.DataFrame | None
    path: str | None = None

    def read(self, columns: Sequence[str] | None) -> pl.DataFrame:
        """Return the rows, with these columns."""
        if self.frame is not None:
            return self.frame if columns is None else self.frame.select(columns)
        assert self.path is not None, "a chunk without rows in memory has a file"
        return pl.read_ipc(self.path, columns=None if columns is None else list(columns))


@dataclass(frozen=True)
class Spilled:
    """Spilled rows, read by index; can be sent to other processes."""

    schema: pl.Schema
    chunks: tuple[Chunk, ...]

    @property
    def height(self) -> int:
        """The number of rows."""
        return sum(c.rows for c in self.chunks)

    @property
    def in_files(self) -> bool:
        """Whether all rows are in files, so that other processes need paths only."""
        return all(c.path is not None for c in self.chunks)

    def sizes(self, columns: Sequence[str]) -> np.ndarray:
        """Return the approximate size of each row in bytes."""
        each = [np.full(c.rows, c.num_bytes / max(c.rows, 1)) for c in self.chunks]
        return np.concatenate([np.empty(0), *each])

    def light(self, columns: Sequence[str]) -> pl.DataFrame:
        """Return some columns of all rows."""
        empty = pl.DataFrame(schema={n: self.schema[n] for n in columns})
        return pl.concat([empty, *(c.read(columns) for c in self.chunks)])

    def read(self, places: np.ndarray, columns: Sequence[str]) -> pl.DataFrame:
        """Return the rows at some indices, in the order of the indices."""
        ends = np.cumsum([c.rows for c in self.chunks])
        starts = ends - np.array([c.rows for c in self.chunks], ends.dtype)
        which = np.searchsorted(ends, places, side="right")
        pieces = [pl.DataFrame(schema={n: self.schema[n] for n in columns})]
        found: list[np.ndarray] = []
        for i in np.unique(which).tolist():
            mine = np.flatnonzero(which == i)
            within = places[mine] - starts[i]
            rows = self.chunks[i].read(columns)
            is_all = len(within) == rows.height and _is_rising(within)
            pieces.append(rows if is_all else _taken(rows, within))
            found.append(mine)
        rows = pl.concat(pieces)
        order = np.concatenate([np.empty(0, np.int64), *found])
        return rows if _is_rising(order) else rows[np.argsort(order)]


class Spill:
    """Collects rows for `Spilled`; closing it removes its files."""

    def __init__(
        self, schema: pl.Schema, *, folder: str | None = None, in_files: bool = False
    ) -> None:
        self._schema, self._parent, self._in_files = schema, folder, in_files
        self._folder: TemporaryDirectory[str] | None = None
        self._chunks: list[Chunk] = []
        self._waiting: list[pl.DataFrame] = []
        self._files = 0
        self._bytes = 0
        """Bytes of the rows that are not yet in a chunk."""

    def put(self, rows: pl.DataFrame) -> None:
        """Append rows; all have the columns of the schema."""
        for piece in _pieces(rows):
            self._waiting.append(piece)
            self._bytes += _size(piece)
            if self._bytes >= CHUNK_BYTES:
                self._flush()

    def done(self) -> Spilled:
        """Return the rows, to be read."""
        self._flush()
        # All of them, if some are in files: other processes are then sent paths and no rows.
        if self._in_files or self._folder is not None:
            self._chunks = [self._written(c) for c in self._chunks]
        return Spilled(self._schema, tuple(self._chunks))

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = pl.concat(self._waiting)
        self._chunks.append(Chunk(rows.height, self._bytes, rows))
        self._waiting, self._bytes = [], 0
        in_memory = sum(c.num_bytes for c in self._chunks if c.frame is not None)
        if in_memory > MEMORY_BYTES:
            self._chunks = [self._written(c) for c in self._chunks]

    def _written(self, chunk: Chunk) -> Chunk:
        if chunk.frame is None:
            return chunk
        try:
            if self._folder is None:
                self._folder = TemporaryDirectory(prefix="rlake-pipeline-", dir=self._parent)
            self._files += 1
            path = str(Path(self._folder.name) / f"{self._files:06d}.arrow")
            # the newest layout would also write the texts of rows that were filtered out
            chunk.frame.write_ipc(path, compat_level=pl.CompatLevel.oldest())
        except OSError as error:
            raise no_room(error) from error
        return Chunk(chunk.rows, chunk.num_bytes, None, path)

    def close(self) -> None:
        """Remove the files."""
        self._chunks, self._waiting = [], []
        if self._folder is not None:
            self._folder.cleanup()


def _pieces(rows: pl.DataFrame) -> Iterable[pl.DataFrame]:
    """Split rows into pieces of about a chunk each."""
    many = max(1, round(_size(rows) / CHUNK_BYTES))
    return rows.iter_slices(max(1, -(-rows.height // many))) if rows.height else ()


def _size(rows: pl.DataFrame) -> int:
    return int(rows.estimated_size())


def _taken(rows: pl.DataFrame, places: np.ndarray) -> pl.DataFrame:
    first = int(places[0])
    if len(places) == int(places[-1]) - first + 1 and _is_rising(places):
        return rows[first : first + len(places)]
    return rows[places]


def _is_rising(places: np.ndarray) -> bool:
    return bool((np.diff(places) > 0).all())
