"""What both methods share: the first of similar rows is kept, whatever comes later."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class Alike:
    """For each row, the first earlier row that is kept and similar, and how similar it is."""

    places: np.ndarray
    """Int64 [rows]; -1 where there is none: that row stays."""
    similarities: np.ndarray
    """Float64 [rows]."""

    @classmethod
    def none(cls, rows: int) -> Self:
        """Return the verdict that all rows stay."""
        return cls(np.full(rows, -1, np.int64), np.full(rows, np.nan))

    def set(self, row: int, place: int, similarity: float) -> None:
        """Say that a row goes, since it is alike the row at `place`."""
        self.places[row], self.similarities[row] = place, similarity


def blocks_of(units: Sequence[object], texts: Sequence[str] | None) -> np.ndarray:
    """Return a number for each row; only rows of the same number may be alike, int64 [rows].

    Those are rows of the same unit whose texts, where they are given, hold the same numbers in any
    order: a problem with other numbers is another problem.

    >>> blocks_of("aab", ["1,000 + 2", "2 + 1000", "2 + 1000"]).tolist()
    [0, 0, 1]
    """
    known: dict[object, int] = {}
    numbers = [()] * len(units) if texts is None else [_numbers(text) for text in texts]
    keys = zip(units, numbers, strict=True)
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def _numbers(text: str) -> tuple[str, ...]:
    # `1,000` and `1000` are one number
    return tuple(sorted(found.replace(",", "") for found in _NUMBER.findall(text)))
