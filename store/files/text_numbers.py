"""Numbers for many texts: how often a row was seen, and the index of a rollout."""

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from ..hash_numbers import HashNumbers
from ..store import Store

Texts = Sequence[str] | pa.Array | pa.ChunkedArray
"""Texts, of which 64-bit hashes are kept."""


class Counts:
    """Counts how often each text was seen."""

    def __init__(self) -> None:
        self._counts = HashNumbers(missing=0)

    def before(self, texts: Texts) -> np.ndarray:
        """Count these texts; return how often each was seen before, including among these.

        >>> counts = Counts()
        >>> counts.before(["a", "b", "a"]), counts.before(["a"])
        (array([0, 0, 1]), array([2]))
        """
        unique, of, times = np.unique(_hashes(texts), return_inverse=True, return_counts=True)
        older = self._counts.find(unique)
        self._counts.put(unique, older + times)
        return older[of] + _ranks(of, times)


class Rollouts:
    """Numbers rollouts in order, after the stored ones of their group.

    Rows that are stored, or were seen before in this import, keep their number; ids identify them.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._is_read = store, False
        self._numbers, self._highest = HashNumbers(missing=-1), HashNumbers(missing=-1)

    def next(self, ids: Texts, groups: Texts) -> np.ndarray:
        """Return the number of each rollout: the stored one, or the next of its group."""
        if not self._is_read:
            self._read()
        unique, first, of = np.unique(_hashes(ids), return_index=True, return_inverse=True)
        numbers = self._numbers.find(unique)
        new = np.flatnonzero(numbers < 0)
        new = new[np.argsort(first[new])]  # numbered in the order of the rows
        groups_of_new = _hashes(groups)[first[new]]
        group, of_group, times = np.unique(groups_of_new, return_inverse=True, return_counts=True)
        highest = self._highest.find(group)
        numbers[new] = highest[of_group] + 1 + _ranks(of_group, times)
        self._numbers.put(unique[new], numbers[new])
        self._highest.put(group, highest + times)
        return numbers[of]

    def _read(self) -> None:
        """Read the numbers of stored rollouts, and the highest of each group."""
        self._is_read = True
        if not self._store.count("experiences"):
            return
        number = pl.col("rollout_index").cast(pl.Int64)
        # as `_hashes`, or no stored row would be found again
        hashes = (pl.col(name).hash(0) for name in ("experience_id", "group_id"))
        rows = self._store.scan("experiences").select(*hashes, number).collect()
        self._numbers.put(rows["experience_id"].to_numpy(), rows["rollout_index"].to_numpy())
        groups = rows.group_by("group_id").agg(pl.col("rollout_index").max())
        self._highest.put(groups["group_id"].to_numpy(), groups["rollout_index"].to_numpy())


def _ranks(of: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return how many earlier places hold the same value; `times` is how often each comes."""
    ranks = np.zeros(len(of), np.int64)
    if len(times) < len(of):
        order = np.argsort(of, kind="stable")
        ranks[order] = np.arange(len(of)) - np.repeat(np.cumsum(times) - times, times)
    return ranks


def _hashes(texts: Texts) -> np.ndarray:
    return pl.Series(values=texts, dtype=pl.String).hash(0).to_numpy()
