"""Vectors that point the same way, found by comparing each with those that stay before it."""

import numpy as np

from .greedy import Alike

_ROWS = 1024
"""Vectors that are compared with those before them at once."""
_NEAR = 1e-4
"""More than what float32 may be wrong by in a sum of products."""
_SCALE = float(1 << 24)


def first_alike(vectors: np.ndarray, blocks: np.ndarray, *, threshold: float) -> Alike:
    """Find for each vector the first one before it that stays, in its block, and is alike.

    `vectors` are [rows, length]; alike are two whose cosine is `threshold` at least. A zero vector
    is alike none.
    """
    found = Alike.none(len(vectors))
    lengths = np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    units = (vectors / np.maximum(lengths, np.finfo(np.float64).tiny)).astype(np.float32)
    order = np.argsort(blocks, kind="stable")
    order = order[lengths[order, 0] > 0]
    cuts = np.flatnonzero(np.diff(blocks[order])) + 1
    for places in np.split(order, cuts):
        if len(places) > 1:
            _Block(units, threshold, found).compare(places)
    return found


class _Block:
    """The vectors that may be alike each other."""

    def __init__(self, units: np.ndarray, threshold: float, found: Alike) -> None:
        self._units, self._threshold, self._found = units, threshold, found

    def compare(self, places: np.ndarray) -> None:
        kept = np.empty(0, np.int64)
        for start in range(0, len(places), _ROWS):
            some = places[start : start + _ROWS]
            stays = self._those_that_stay(some, self._near(some, kept))
            kept = np.concatenate([kept, stays])

    def _near(self, some: np.ndarray, kept: np.ndarray) -> list[list[int]]:
        """Return for each of some rows those that are nearly alike, of the kept and of itself."""
        near: list[list[int]] = [[] for _ in some]
        for start in range(0, len(kept) + len(some), 8 * _ROWS):
            others = np.concatenate([kept, some])[start : start + 8 * _ROWS]
            cosines = self._units[some] @ self._units[others].T
            # BLAS's float32 sums differ between machines: these are only candidates, and `_cosine`
            # decides exactly
            for row, place in np.argwhere(cosines >= self._threshold - _NEAR):
                if others[place] < some[row]:
                    near[row].append(int(others[place]))
        return near

    def _those_that_stay(self, some: np.ndarray, near: list[list[int]]) -> np.ndarray:
        stays: list[int] = []
        for place, others in zip(some.tolist(), near, strict=True):
            for other in others:
                if self._found.places[other] >= 0:
                    continue
                similarity = self._cosine(place, other)
                if similarity >= self._threshold:
                    self._found.set(place, other, similarity)
                    break
            else:
                stays.append(place)
        return np.array(stays, np.int64)

    def _cosine(self, one: int, other: int) -> float:
        # products of whole numbers add up to less than 2^53: the same bits in any order
        a, b = (np.rint(self._units[i].astype(np.float64) * _SCALE) for i in (one, other))
        return round(float(a @ b) / _SCALE**2, 6)
