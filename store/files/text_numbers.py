"""Numbers for many texts: how often a row was seen, and the index of a rollout."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from ..store import Store

_RECENT = 50_000
"""Numbers kept in a dict before they are sorted into arrays."""


class TextNumbers:
    """An integer for each of many texts, in 16 bytes: texts are identified by 64-bit hashes."""

    def __init__(self, *, missing: int) -> None:
        """Use the number `missing` for unknown texts."""
        self._missing = missing
        self._keys, self._values = np.empty(0, np.uint64), np.empty(0, np.int64)
        self.recent: dict[int, int] = {}
        """Numbers by hash since the last `settle`; they override older ones."""

    def load(self, hashes: np.ndarray, values: np.ndarray) -> None:
        """Start with these numbers."""
        order = np.argsort(hashes)
        self._keys, self._values = hashes[order], values[order]

    def settled(self, hashes: np.ndarray) -> list[int]:
        """Return the number of each hash, ignoring `recent` ones."""
        if not len(self._keys):
            return [self._missing] * len(hashes)
        at = np.minimum(np.searchsorted(self._keys, hashes), len(self._keys) - 1)
        return np.where(self._keys[at] == hashes, self._values[at], self._missing).tolist()

    def settle(self) -> None:
        """Merge the recent numbers into the arrays once they are many: a dict takes far more."""
        size = len(self.recent)
        if size <= _RECENT:
            return
        keys = np.concatenate([np.fromiter(self.recent, np.uint64, size), self._keys])
        values = np.fromiter(self.recent.values(), np.int64, size)
        # `unique` returns the first position of a repeated key: that of the recent number
        self._keys, first = np.unique(keys, return_index=True)
        self._values = np.concatenate([values, self._values])[first]
        self.recent = {}


class Counts:
    """Counts how often each text was seen."""

    def __init__(self) -> None:
        self._counts = TextNumbers(missing=0)

    def before(self, texts: Sequence[str]) -> list[int]:
        """Count these texts; return how often each was seen before, including among these.

        >>> counts = Counts()
        >>> counts.before(["a", "b", "a"]), counts.before(["a"])
        ([0, 0, 1], [2])
        """
        hashes, recent = _hashes(texts), self._counts.recent
        found = []
        for key, older in zip(hashes.tolist(), self._counts.settled(hashes), strict=True):
            found.append(recent.get(key, older))
            recent[key] = found[-1] + 1
        self._counts.settle()
        return found


class Rollouts:
    """Numbers rollouts in order, after the stored ones of their group.

    Rows that are stored, or were seen before in this import, keep their number; ids identify them.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._is_read = store, False
        self._numbers, self._highest = TextNumbers(missing=-1), TextNumbers(missing=-1)

    def fill(
        self, ids: Sequence[str], groups: Sequence[str], rollouts: Sequence[int | None]
    ) -> list[int]:
        """Return the number of each rollout: its own, the stored one, or the next of its group."""
        if not self._is_read:
            self._read()
        found: list[int] = []
        id_hashes, group_hashes = _hashes(ids), _hashes(groups)
        stored = zip(id_hashes.tolist(), self._numbers.settled(id_hashes), strict=True)
        highest = zip(group_hashes.tolist(), self._highest.settled(group_hashes), strict=True)
        given, last = self._numbers.recent, self._highest.recent
        for own, (row, known), (group, top) in zip(rollouts, stored, highest, strict=True):
            number = given.get(row, known)
            if number < 0:
                number = given[row] = last[group] = last.get(group, top) + 1
            found.append(number if own is None else own)
        # after the loop, which uses the dicts that this replaces
        self._numbers.settle()
        self._highest.settle()
        return found

    def _read(self) -> None:
        """Read the numbers of stored rollouts, and the highest of each group."""
        self._is_read = True
        if not self._store.count("experiences"):
            return
        number = pl.col("rollout_index").cast(pl.Int64)
        # as `_hashes`, or no stored row would be found again
        hashes = (pl.col(name).hash(0) for name in ("experience_id", "group_id"))
        rows = self._store.scan("experiences").select(*hashes, number).collect()
        self._numbers.load(rows["experience_id"].to_numpy(), rows["rollout_index"].to_numpy())
        groups = rows.group_by("group_id").agg(pl.col("rollout_index").max())
        self._highest.load(groups["group_id"].to_numpy(), groups["rollout_index"].to_numpy())


def _hashes(texts: Sequence[str]) -> np.ndarray:
    return pl.Series(texts, dtype=pl.String).hash(0).to_numpy()
