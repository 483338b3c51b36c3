"""How often each of very many keys was seen, in a few bytes a key."""

from collections.abc import Sequence

import numpy as np
import polars as pl

_RECENT = 50_000


class Counts:
    """Counts keys by a hash of 64 bits: some are kept as they come, all others in sorted arrays."""

    def __init__(self) -> None:
        self._hashes = np.empty(0, np.uint64)
        self._counts = np.empty(0, np.uint32)
        self._recent: dict[int, int] = {}

    def before(self, keys: Sequence[str]) -> list[int]:
        """Return for each key how often it was seen before, also among these; they are counted.

        >>> counts = Counts()
        >>> counts.before(["a", "b", "a"]), counts.before(["a"])
        ([0, 0, 1], [2])
        """
        hashes = pl.Series(keys, dtype=pl.String).hash(0).to_numpy()
        older = self._older(hashes).tolist()
        found = []
        for key, old in zip(hashes.tolist(), older, strict=True):
            recent = self._recent.get(key, 0)
            found.append(old + recent)
            self._recent[key] = recent + 1
        if len(self._recent) > _RECENT:
            self._merge()
        return found

    def _older(self, hashes: np.ndarray) -> np.ndarray:
        if not len(self._hashes):
            return np.zeros(len(hashes), np.uint32)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return np.where(self._hashes[at] == hashes, self._counts[at], 0)

    def _merge(self) -> None:
        recent = np.fromiter(self._recent, np.uint64, len(self._recent))
        counts = np.fromiter(self._recent.values(), np.uint32, len(recent))
        both = np.concatenate([self._hashes, recent])
        self._hashes, place = np.unique(both, return_inverse=True)
        summed = np.zeros(len(self._hashes), np.uint32)
        np.add.at(summed, place, np.concatenate([self._counts, counts]))
        self._counts, self._recent = summed, {}
