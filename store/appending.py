"""Appending: rows are checked, those that are stored already left out, the rest is one commit."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lance
import pyarrow as pa

from .errors import StoreError, reason
from .keys import KeyIndex, Seen
from .locks import locked
from .schema import TABLES, Table, table
from .validate import Rows, conform

if TYPE_CHECKING:
    from .store import Store


@dataclass(frozen=True)
class Appended:
    """What an append did: rows written, rows that were there already, and the table's version."""

    rows: int
    already: int
    version: int


class Appender:
    """Appends to the tables of one store, one append to a table at a time."""

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._keys = {name: KeyIndex(TABLES[name]) for name in TABLES}
        self._writing = {name: threading.Lock() for name in TABLES}

    def append(self, name: str, batches: Iterator[Rows], *, stream: bool) -> Appended:
        """Append batches of rows in one commit; a `stream` may have an id in two batches."""
        store, declared = self._store, table(name)
        if store.is_past:
            raise StoreError(
                f"{store!r} is read only: it shows the past; append to the store itself"
            )
        keys = self._keys[name]
        with self._writing[name], locked(store.folder, name):
            dataset = store.dataset(name)
            keys.refresh(dataset)
            writing = _Writing(declared, keys, dataset, {} if stream else None)
            fresh = writing.batches(batches)
            first = next(fresh, None)
            if first is not None:
                dataset = self._commit(name, dataset, writing, _chain(first, fresh))
        store.committed(name, dataset)
        return Appended(len(writing.hashes), writing.already, dataset.version)

    def _commit(
        self,
        name: str,
        dataset: lance.LanceDataset,
        writing: "_Writing",
        rows: Iterator[pa.RecordBatch],
    ) -> lance.LanceDataset:
        reader = pa.RecordBatchReader.from_batches(TABLES[name].schema, rows)
        try:
            written = lance.write_dataset(reader, dataset, mode="append")
        except (OSError, ValueError, RuntimeError) as error:
            if writing.error is not None:
                raise writing.error from None
            raise StoreError(
                f"cannot write to `{name}`: {reason(error)}; nothing was stored"
            ) from error
        assert isinstance(written, lance.LanceDataset)
        if written.version == dataset.version + 1:  # else others wrote too: the next one looks
            self._keys[name].committed(written, writing.hashes)
        return written


class _Writing:
    """One append under way: what was written, left out, or went wrong in the rows' own iterator."""

    def __init__(
        self, declared: Table, keys: KeyIndex, dataset: lance.LanceDataset, seen: Seen | None
    ) -> None:
        self._declared, self._keys, self._dataset, self._seen = declared, keys, dataset, seen
        self.hashes: list[int] = []
        self.already = 0
        self.error: BaseException | None = None

    def batches(self, batches: Iterator[Rows]) -> Iterator[pa.RecordBatch]:
        try:
            for data in batches:
                rows = conform(self._declared, data)
                fresh, hashes = self._keys.fresh(rows, self._dataset, self._seen)
                self.already += rows.num_rows - fresh.num_rows
                self.hashes += hashes
                yield from fresh.to_batches()
        except BaseException as error:
            self.error = error
            raise


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest
