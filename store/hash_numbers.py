"""Integers for many keys, which are known by 64-bit hashes."""

import numpy as np

_GROWTH = 4
"""A run of hashes is merged into the next one until that is so many times as long."""


class HashNumbers:
    """An integer for each of many hashes, in 16 bytes where a dict takes about a hundred.

    Hashes come in batches, each a sorted run. Runs of similar length are merged, as in a
    log-structured merge tree: a few are searched, and a hash is moved a few times.

    >>> numbers = HashNumbers(missing=-1)
    >>> numbers.put(np.array([7, 3], np.uint64), np.array([70, 30]))
    >>> numbers.find(np.array([3, 4], np.uint64)).tolist()
    [30, -1]
    """

    def __init__(self, *, missing: int) -> None:
        """Give the number `missing` for unknown hashes."""
        self._missing = missing
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the number of each hash; sorted ones are found in a third of the time."""
        found = np.full(len(hashes), self._missing, np.int64)
        # the oldest run first: a newer number takes its place
        for keys, values in self._runs:
            at = np.minimum(np.searchsorted(keys, hashes), len(keys) - 1)
            is_there = keys[at] == hashes
            found[is_there] = values[at[is_there]]
        return found

    def put(self, hashes: np.ndarray, values: np.ndarray) -> None:
        """Set the number of each of these hashes, whether it had one or not."""
        if not len(hashes):
            return
        keys, first = np.unique(hashes, return_index=True)
        values = values[first]
        while self._runs and len(self._runs[-1][0]) < _GROWTH * len(keys):
            older, numbers = self._runs.pop()
            # `unique` returns the first position of a repeated key: that of the newer number
            keys, first = np.unique(np.concatenate([keys, older]), return_index=True)
            values = np.concatenate([values, numbers])[first]
        self._runs.append((keys, values))
