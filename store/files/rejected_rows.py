"""Invalid lines and rows that an import skips: counted, and recorded with the reason."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import JobError, SchemaError
from ..raw_json import json_line
from .atomic_writer import part_of

_MOST_REASONS = 1000
_OTHERS = "other reasons"
_MOST_BYTES = 1 << 20
"""Bytes of lines kept in memory before they are written."""


class Rejected:
    """Skipped lines and rows, by reason; the file is created when there is one to write."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.why: Counter[str] = Counter()
        self._part: Path | None = None
        self._lines: list[str] = []
        self._size = 0

    def add(self, file: str, what: str, number: int, why: str, content: Any) -> None:
        """Record one line or row, numbered from 1."""
        known = why in self.why or len(self.why) < _MOST_REASONS
        self.why[why if known else _OTHERS] += 1
        if self.path is None:
            return
        message = {"file": file, what: number, "reason": why, "content": content}
        self._lines.append(json_line(message) + "\n")
        self._size += len(self._lines[-1])
        if self._size > _MOST_BYTES:
            self._flush(self.path)

    def _flush(self, path: Path) -> None:
        if self._part is None:
            self._part = part_of(path)
            # an earlier import of this process may have left it, and lines are appended
            self._part.unlink(missing_ok=True)
        with self._part.open("a", encoding="utf-8", errors="backslashreplace") as out:
            out.writelines(self._lines)
        self._lines, self._size = [], 0

    def write(self) -> None:
        """Write the file atomically, replacing an older one."""
        if self.path is None or not self.why:
            return
        try:
            self._flush(self.path)
            assert self._part is not None, "it was just written"
            self._part.replace(self.path)
        except OSError as error:
            raise JobError(
                f"what was left out cannot be written to `{self.path}`: {error.strerror}; the "
                "other rows are imported"
            ) from error


def sieved(
    rows: pa.Table,
    places: Sequence[int],
    probe: Callable[[pa.Table], object],
    reject: Callable[[int, str, pa.Table], None],
) -> tuple[Sequence[int], pa.Table]:
    """Return the rows that `probe` accepts, with their places; rows of one place stay together.

    The others are passed to `reject`, with their place and the reason.
    """
    try:
        probe(rows)
    except SchemaError:
        good: list[int] = []
        start = 0
        for end in range(1, len(places) + 1):
            if end < len(places) and places[end] == places[start]:
                continue
            part = rows.slice(start, end - start)
            try:
                probe(part)
                good += range(start, end)
            except SchemaError as error:
                reject(places[start], str(error), part)
            start = end
        return [places[i] for i in good], rows.take(pa.array(good, pa.int64()))
    return places, rows
