"""Arrays that grow at their end, divided into blocks, and a lookup of values in them."""

import numpy as np

BLOCK = 256
"""Units summed together: a draw reads one number per block, and the units of few blocks."""
_SPARE = 1.1


class GrowableArray:
    """An array that grows at its end; it has room for a whole number of blocks."""

    def __init__(self, dtype: type[np.generic], *, fill: float = 0) -> None:
        self._fill = fill
        self._data = np.full(0, fill, dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, values: np.ndarray) -> None:
        """Add values at the end."""
        size = self._size + len(values)
        if size > len(self._data):
            # spare room from the second time on: every growth copies the whole array
            blocks = -(-int(size * _SPARE if self._size else size) // BLOCK)
            grown = np.full(blocks * BLOCK, self._fill, self._data.dtype)
            grown[: self._size] = self.values
            self._data = grown
        self._data[self._size : size] = values
        self._size = size

    @property
    def values(self) -> np.ndarray:
        """All values; a write goes through."""
        return self._data[: self._size]

    @property
    def blocks(self) -> np.ndarray:
        """The values as (blocks, BLOCK), the last block filled up."""
        used = -(-self._size // BLOCK)
        return self._data[: used * BLOCK].reshape(used, BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, spare room included."""
        return self._data.nbytes


class Places:
    """Finds the positions of hashes in a growing array: sorted runs, merged as they accumulate.

    New values are sorted on the next lookup, since most draws look up nothing.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[int, np.ndarray]] = []

    def find(self, hashes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Return the place of each wanted hash among `hashes`, -1 where it is not there."""
        self._extend(hashes)
        found = np.full(len(wanted), -1, np.int64)
        for start, order in self._runs:
            run = hashes[start : start + len(order)]
            # A value above all others is compared with the last one, from which it differs.
            at = order[np.minimum(np.searchsorted(run, wanted, sorter=order), len(run) - 1)]
            hits = run[at] == wanted
            found[hits] = start + at[hits]
        return found

    def _extend(self, hashes: np.ndarray) -> None:
        """Note those of all `hashes` that came since the last call."""
        start = self._known
        if start == len(hashes):
            return
        # merge a run only with at least as many new values, so that each is sorted few times
        while self._runs and len(self._runs[-1][1]) <= len(hashes) - start:
            start, _ = self._runs.pop()
        # int32 takes half the memory, and an index has fewer than two billion rows.
        order = np.argsort(hashes[start:], kind="stable").astype(np.int32)
        self._runs.append((start, order))

    @property
    def _known(self) -> int:
        return self._runs[-1][0] + len(self._runs[-1][1]) if self._runs else 0

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(order.nbytes for _, order in self._runs)


def repeats(values: np.ndarray) -> np.ndarray:
    """Return how often each value came before in the same array.

    >>> repeats(np.array([5, 7, 5, 5])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values, kind="stable")
    sorted_ = values[order]
    first = np.flatnonzero(np.append(True, sorted_[1:] != sorted_[:-1])) if len(values) else order
    sizes = np.diff(np.append(first, len(values)))
    nth = np.empty(len(values), np.int64)
    nth[order] = np.arange(len(values)) - np.repeat(first, sizes)
    return nth
