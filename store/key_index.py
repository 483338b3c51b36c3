"""Index of the keys in a table, which makes appends idempotent."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .changes import ChangeFeed
from .errors import ConflictError
from .hash_numbers import HashNumbers
from .query import is_in
from .row_digests import whole_rows
from .schema import Table

_IN_CHUNK = 500
_IN_SET = 50_000
_FEW = 4096
"""Hashes for which Python's sets are faster than arrays."""

Key = tuple[object, ...]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def newest(rows: pa.Table) -> datetime:
    """Return the largest `created_at` of some rows, EPOCH when there are none."""
    return pc.max(rows.column("created_at")).as_py() or EPOCH


def content(rows: pa.Table, table: Table) -> pa.Table:
    """Return rows without the columns that say when, and by which import or run, they were stored.

    Columns that other programs added are left out too. A key that is a hash says all.
    """
    if table.is_content_addressed:
        return rows.select(table.key)
    aside = {"created_at", "lineage_id", *(["digest"] if table.is_digested else [])}
    return rows.select([name for name in table.names if name not in aside])


def rows_with(
    dataset: lance.LanceDataset,
    column: str,
    values: Iterable[str],
    columns: Sequence[str] | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows that have one of these values in a column, 500 values at a time."""
    listed = sorted(values)
    for i in range(0, len(listed), _IN_CHUNK):
        wanted = is_in(column, listed[i : i + _IN_CHUNK])
        yield dataset.to_table(columns=None if columns is None else [*columns], filter=wanted)


class Seen:
    """The keys that earlier batches of an append held, with the digests of their content."""

    def __init__(self) -> None:
        self._places, self._size = HashNumbers(missing=-1), 0
        self._parts: list[tuple[int, pa.Table, pa.Array]] = []
        """Rows of keys and their digests, after the number of the first; Arrow takes the least."""

    def places(self, hashes: np.ndarray) -> np.ndarray:
        """Return the number of the row that had a key of this hash, or -1."""
        return self._places.find(hashes)

    def rows(self, places: np.ndarray) -> dict[Key, str]:
        """Return the keys of rows, each with the digest of its content."""
        found: dict[Key, str] = {}
        starts = [first for first, *_ in self._parts]
        for place in places.tolist():
            first, keys, digests = self._parts[bisect_right(starts, place) - 1]
            [key] = _tuples(keys.slice(place - first, 1))
            found[key] = digests[place - first].as_py()
        return found

    def add(
        self, hashes: np.ndarray, keys: pa.Table, digests: Sequence[str], kept: np.ndarray
    ) -> None:
        """Note rows by the hashes of their keys."""
        self._places.put(hashes, self._size + np.arange(len(hashes)))
        self._parts.append((self._size, keys, pa.array(digests, pa.string()).take(kept)))
        self._size += len(hashes)


def _tuples(keys: pa.Table) -> list[Key]:
    return list(zip(*(column.to_pylist() for column in keys.columns), strict=True))


class KeyIndex:
    """Hashes of all keys of one table, and its latest time, updated from new fragments only.

    Keys that a restore removed may stay here, so each hit is looked up in the table.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._old = np.empty(0, np.uint64)
        self._new: set[int] = set()
        self._tail = ChangeFeed([*dict.fromkeys((*table.key, "created_at"))])
        self.newest = EPOCH
        """The largest `created_at` that was seen in the table."""

    def refresh(self, dataset: lance.LanceDataset) -> None:
        """Read the keys of rows added since the last call."""
        if self._tail.moved(dataset):
            rows = self._tail.read(dataset)
            self._add(self._hash(rows))
            self.newest = max(self.newest, newest(rows))

    def committed(self, dataset: lance.LanceDataset, hashes: list[int], newest: datetime) -> None:
        """Note an append of this process, which is all that is new up to this version."""
        self._add(np.array(hashes, np.uint64))
        self.newest = max(self.newest, newest)
        self._tail.skip(dataset)

    def fresh(
        self, rows: pa.Table, dataset: lance.LanceDataset, seen: Seen | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """Return the places of the rows whose keys are new, and the hashes of their keys.

        A row that is stored already with the same content is left out; with other content it
        raises ConflictError. What is not content may differ: a retry may come later. `seen` carries
        what earlier batches of the same append held.
        """
        hashes = self._hash(rows)
        known = self._known(hashes)
        unique, of = np.unique(hashes, return_inverse=True)
        is_one = len(unique) == len(hashes)
        # the common case returns here: row digests cost more than the rest of an append
        if seen is None and not known.any() and is_one:
            return np.arange(len(hashes)), hashes.tolist()
        # an equal id is a retry only with equal content
        digests = whole_rows(content(rows, self._table))
        places = np.full(len(hashes), -1) if seen is None else seen.places(unique)[of]
        doubtful = np.flatnonzero(known | (places >= 0) | (not is_one))
        is_new = np.ones(len(hashes), bool)
        if len(doubtful):
            # hashes collide and restores remove rows: the table itself decides
            there = self._stored(rows.filter(pa.array(known)), dataset)
            before = seen.rows(places[places >= 0]) if seen is not None else {}
            is_new[doubtful] = self._are_new(rows, doubtful, digests, there, before)
        keep = np.flatnonzero(is_new)
        if seen is not None:
            seen.add(hashes[keep], rows.select(self._table.key).take(keep), digests, keep)
        return keep, hashes[keep].tolist()

    def _are_new(
        self,
        rows: pa.Table,
        places: np.ndarray,
        digests: Sequence[str],
        there: Mapping[Key, str],
        before: Mapping[Key, str],
    ) -> list[bool]:
        """Return which of the rows at these places are not stored and come for the first time."""
        known = {**before, **there}
        found: list[bool] = []
        at: list[int] = places.tolist()
        for i, key in zip(at, self._keys(rows.take(places)), strict=True):
            if known.get(key, digests[i]) != digests[i]:
                raise self._conflict(key, is_stored=key in there)
            found.append(key not in known)
            known[key] = digests[i]
        return found

    def _conflict(self, key: Key, *, is_stored: bool) -> ConflictError:
        if is_stored:
            return ConflictError(
                f"{self._named(key)} is in `{self._table.name}` already with other content; "
                "stored rows do not change: give the new row an id of its own"
            )
        return ConflictError(
            f"{self._named(key)} comes twice among the new rows of `{self._table.name}`, with "
            "other content; give each row an id of its own"
        )

    def _stored(self, rows: pa.Table, dataset: lance.LanceDataset) -> dict[Key, str]:
        """Read the stored rows that may have the keys of `rows`, as key -> digest of content."""
        found: dict[Key, str] = {}
        column = self._table.key[0]
        values = {v for v in rows.column(column).to_pylist() if v is not None}
        for hits in rows_with(dataset, column, map(str, values)):
            digests = whole_rows(content(hits, self._table))
            found.update(zip(self._keys(hits), digests, strict=True))
        return found

    def _keys(self, rows: pa.Table) -> list[Key]:
        return _tuples(rows.select(self._table.key))

    def _add(self, hashes: np.ndarray) -> None:
        """Note hashes; many are kept in a sorted array, which takes a tenth of a set's memory."""
        if len(hashes) <= _FEW:
            self._new.update(hashes.tolist())
            if len(self._new) <= _IN_SET:
                return
            hashes = np.fromiter(self._new, np.uint64, len(self._new))
            self._new = set()
        both = np.concatenate([self._old, np.sort(hashes)])
        both.sort(kind="stable")  # merges the two sorted runs in one pass
        self._old = both

    def _known(self, hashes: np.ndarray) -> np.ndarray:
        """Return which hashes were noted."""
        if len(hashes) <= _FEW:
            known = np.fromiter((h in self._new for h in hashes.tolist()), np.bool_, len(hashes))
        else:
            known = np.isin(hashes, np.fromiter(self._new, np.uint64, len(self._new)))
        if len(self._old):
            at = np.minimum(np.searchsorted(self._old, hashes), len(self._old) - 1)
            known |= self._old[at] == hashes
        return known

    def _hash(self, rows: pa.Table) -> np.ndarray:
        import polars as pl

        keys = pl.DataFrame(pl.from_arrow(rows.select(self._table.key)))
        # kept in memory only: Polars promises equal hashes within one of its versions
        return keys.hash_rows(0).to_numpy()

    def _named(self, key: Key) -> str:
        return ", ".join(f"`{k}` {v!r}" for k, v in zip(self._table.key, key, strict=True))
