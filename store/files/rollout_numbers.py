"""The number of a try within its group, also where a group comes in several files and imports."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from ..store import Store

_RECENT = 50_000
"""Rows whose numbers are kept as they come, before they are sorted."""


class Rollouts:
    """Numbers tries as they come: after those of their group that are stored.

    What is stored, or came before in this import, keeps its number: rows are told by their ids.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next: dict[int, int] = {}
        """The next number of each group, by hash."""
        self._given: dict[int, int] = {}
        """The number of each try of this import, by hash."""
        self._ids, self._numbers = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._highest: tuple[np.ndarray, np.ndarray] | None = None

    def fill(
        self, ids: Sequence[str], groups: Sequence[str], rollouts: Sequence[int | None]
    ) -> list[int]:
        """Return the number of each try: its own, the stored one, or the next of its group."""
        if self._highest is None:
            self._highest = self._read()
        found: list[int] = []
        id_hashes, group_hashes = _hashes(ids), _hashes(groups)
        stored: list[int] = _look_up(self._ids, self._numbers, id_hashes).tolist()
        highest: list[int] = _look_up(*self._highest, group_hashes).tolist()
        keys = zip(id_hashes.tolist(), group_hashes.tolist(), strict=True)
        for own, known, last, (id_, group) in zip(rollouts, stored, highest, keys, strict=True):
            number = self._given.get(id_, known)
            if number < 0:
                number = self._next.get(group, last + 1)
                self._next[group] = number + 1
                self._given[id_] = number
            found.append(number if own is None else own)
        if len(self._given) > _RECENT:
            self._merge()
        return found

    def _merge(self) -> None:
        """Keep what came so far in sorted arrays, which take a few bytes a row."""
        assert self._highest is not None, "there were rows"
        self._ids, self._numbers = _merged((self._ids, self._numbers), self._given)
        last = {group: number - 1 for group, number in self._next.items()}
        self._highest = _merged(self._highest, last)
        self._given, self._next = {}, {}

    def _read(self) -> tuple[np.ndarray, np.ndarray]:
        """Read the numbers of the tries that are stored, and the highest of each group."""
        if not self._store.count("experiences"):
            return self._ids, self._numbers
        rows = (
            self._store.scan("experiences")
            .select(
                pl.col("experience_id").hash(0),
                pl.col("group_id").hash(0),
                pl.col("rollout").cast(pl.Int64),
            )
            .collect()
        )
        by_id = rows.select("experience_id", "rollout").sort("experience_id")
        self._ids, self._numbers = (by_id[c].to_numpy() for c in by_id.columns)
        by_group = rows.group_by("group_id").agg(pl.col("rollout").max()).sort("group_id")
        return by_group["group_id"].to_numpy(), by_group["rollout"].to_numpy()


def _hashes(texts: Sequence[str]) -> np.ndarray:
    return pl.Series(texts, dtype=pl.String).hash(0).to_numpy()


def _merged(
    older: tuple[np.ndarray, np.ndarray], newer: dict[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return keys, sorted, with their values; of a key that came again the newer value."""
    keys = np.concatenate([np.fromiter(newer, np.uint64, len(newer)), older[0]])
    values = np.concatenate([np.fromiter(newer.values(), np.int64, len(newer)), older[1]])
    keys, places = np.unique(keys, return_index=True)
    return keys, values[places]


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each key, -1 for those that are not there."""
    if not len(keys):
        return np.full(len(wanted), -1)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], -1)
