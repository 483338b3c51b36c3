"""Append rows: check them, skip those that are stored already, commit the rest at once."""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from time import monotonic, sleep

import lance
import numpy as np
import pyarrow as pa

from . import interrupts
from .errors import FAILURES, BusyError, SchemaError, write_error
from .key_index import KeyIndex, Seen, newest
from .leases import LOCK_SECONDS
from .locks import locked
from .records import now
from .row_digests import with_digests
from .schema import TABLES, Table, table
from .schema_versions import refuse_foreign
from .tables import Tables, check_present
from .validate import Rows, check, stamp

TRIES = 6
"""How often an append is tried before it raises BusyError."""
_PAUSE_SECONDS = 0.05
_ROWS_PER_FILE = 65_536
"""Bounds memory: pages and statistics of an open file take about a kilobyte per row."""
_AHEAD = timedelta(days=1)
"""How far a row's own `created_at` may be ahead: the table's clock follows it."""
_TICK = timedelta(microseconds=1)


@dataclass(frozen=True)
class Appended:
    """The result of an append: rows written, rows stored before, and the table's version."""

    rows: int
    duplicates: int
    version: int


class WritableTables(Tables):
    """Tables that rows are appended to, one append to a table at a time.

    Rows without a time get one: now, or the microsecond after the table's latest time if that is
    later, because a clock was turned back or differs. So time never runs backwards within a table,
    whichever processes write it. Rows with a time of their own keep it, up to a day ahead of the
    clock; a later time is refused, since every following row would have to be later still.
    """

    def __init__(
        self,
        uri: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        versions: Mapping[str, int] | None = None,
        branch: str | None = None,
    ) -> None:
        super().__init__(uri, storage_options=storage_options, versions=versions, branch=branch)
        self._keys = {name: KeyIndex(TABLES[name]) for name in TABLES}
        self._writing = {name: threading.Lock() for name in TABLES}

    def append(self, name: str, data: Rows) -> Appended:
        """Append rows to a table in one commit, and return when they are stored.

        Rows are checked against the declared columns. A row that is stored already (same id, same
        content) is left out, so that a retry is harmless. While the store is busy, it is retried.

        Raises SchemaError for rows that do not fit, ConflictError for the id of a stored row with
        other content, StoreError when they could not be written. Then nothing is stored.
        """
        return append_all(self, name, [data])[0]

    def append_stream(self, name: str, batches: Iterable[Rows]) -> Appended:
        """Append batches of rows in one commit: all of them, or none when one raises.

        Only one batch at a time is in memory, and a digest of each row; an id may be in two of
        them.
        """
        with interrupts.at_once():
            # no retry when the store is busy: the iterator is consumed
            writing = self._write(name, lambda new: new.batches(iter(batches)))
        return writing.result()

    def append_streams(self, parts: Mapping[str, Iterable[Rows]]) -> dict[str, Appended]:
        """Append batches of rows to several tables: to all of them, or to none when one raises.

        All rows are checked and written before the first commit; each table gets one, in the given
        order, so that no row refers to one that is missing.
        """
        with interrupts.at_once(), ExitStack() as held:
            # locks in the order of names: two writers with different orders would deadlock
            begun = {name: held.enter_context(self._begun(name)) for name in sorted(parts)}
            written = {n: self._prepared(begun[n], parts[n]) for n in reversed([*parts])}
            for name in parts:
                self._land(begun[name], written[name])
        for name, writing in begun.items():
            self.committed(name, writing.dataset)
        return {name: begun[name].result() for name in parts}

    def _prepared(
        self, writing: "_Writing", batches: Iterable[Rows]
    ) -> lance.LanceOperation.BaseOperation | None:
        """Write the new rows of a table to files that no version refers to yet."""
        fresh = writing.batches(iter(batches))
        first = next(fresh, None)
        if first is None:
            return None
        schema = writing.declared.schema
        reader = pa.RecordBatchReader.from_batches(schema, chain([first], fresh))
        with _failing(writing):
            files = lance.fragment.write_fragments(
                reader, writing.dataset, mode="append", max_rows_per_file=_ROWS_PER_FILE
            )
        assert isinstance(files, list)
        return lance.LanceOperation.Append(files)

    def _land(
        self, writing: "_Writing", operation: lance.LanceOperation.BaseOperation | None
    ) -> None:
        dataset = writing.dataset
        if operation is None:
            return
        with _failing(writing):
            # Lance retries it on top of what others appended since: appends never conflict
            written = lance.LanceDataset.commit(
                dataset,
                operation,
                read_version=dataset.version,
                storage_options=self.storage_options,
            )
        self._noted(writing, written)

    def _write(
        self, name: str, read: "Callable[[_Writing], Iterator[pa.RecordBatch]]"
    ) -> "_Writing":
        """Commit the new rows among those that `read` yields."""
        with self._begun(name) as writing:
            fresh = read(writing)
            first = next(fresh, None)
            if first is not None:
                # only new rows are committed: a retry must not create a version
                self._commit(writing, first.schema, chain([first], fresh))
        self.committed(name, writing.dataset)
        return writing

    @contextmanager
    def _begun(self, name: str) -> "Iterator[_Writing]":
        """Take the table's lock and read what other processes wrote."""
        declared = table(name)
        check_present(self, "append to")
        keys = self._keys[name]
        # threads queue for this process's lock first: each waiter for the store's lock takes a file
        # and a thread, or polls a lease
        with self._writing[name], locked(self, name) as check_lock:
            # within the lock: a row that another process stores after this would be stored twice
            dataset = self.dataset(name, to_write=True)
            check_lock()
            keys.refresh(dataset)
            yield _Writing(declared, keys, dataset)

    def _commit(
        self, writing: "_Writing", schema: pa.Schema, rows: Iterator[pa.RecordBatch]
    ) -> None:
        reader = pa.RecordBatchReader.from_batches(schema, rows)
        with _failing(writing):
            written = lance.write_dataset(
                reader, writing.dataset, mode="append", max_rows_per_file=_ROWS_PER_FILE
            )
        assert isinstance(written, lance.LanceDataset)
        self._noted(writing, written)

    def _noted(self, writing: "_Writing", written: lance.LanceDataset) -> None:
        # else other processes wrote too, and the next append reads their keys
        if written.version == writing.dataset.version + 1:
            self._keys[writing.declared.name].committed(written, writing.hashes, writing.newest)
        writing.dataset = written


@contextmanager
def _failing(writing: "_Writing") -> Iterator[None]:
    """Turn Lance's errors into ours; an error of the rows' own iterator is raised as it is."""
    try:
        yield
    except FAILURES as error:
        if writing.error is not None:
            raise writing.error from None
        refuse_foreign(writing.declared, writing.dataset)
        raise write_error(writing.declared.name, error) from error


class _Writing:
    """An append in progress: rows written and skipped, and the error of the rows' iterator."""

    def __init__(self, declared: Table, keys: KeyIndex, dataset: lance.LanceDataset) -> None:
        self.declared, self._keys, self.dataset = declared, keys, dataset
        self._latest = max(now(), keys.newest) + _AHEAD
        self.newest = keys.newest
        """The latest time that a row has, or was given."""
        self.hashes: list[int] = []
        self.counts: list[tuple[int, int]] = []
        """Rows written and rows that were there already, of each batch."""
        self.error: BaseException | None = None

    def result(self) -> Appended:
        """Return the totals of all batches."""
        # the zeros are for an append of no batches
        rows, already = np.sum([(0, 0), *self.counts], axis=0).tolist()
        return Appended(rows, already, self.dataset.version)

    def batches(self, batches: Iterator[Rows]) -> Iterator[pa.RecordBatch]:
        """Yield the new rows of batches that are read one by one."""
        seen = Seen()
        try:
            for data in batches:
                rows = self._stamped(check(self.declared, data))
                fresh = self._fresh(rows, [rows.num_rows], seen)
                # all columns: one that is NULL in this batch may have values in the next
                yield from fresh.to_batches()
        except BaseException as error:
            self.error = error
            raise

    def together(self, parts: Sequence[pa.Table]) -> Iterator[pa.RecordBatch]:
        """Yield the new rows of batches in memory, whose ids are compared at once."""
        tables = [self._stamped(rows) for rows in parts]
        rows = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
        fresh = self._fresh(rows, [t.num_rows for t in tables], None)
        yield from _filled(fresh).to_batches()

    def _stamped(self, rows: pa.Table) -> pa.Table:
        # the clock may have been turned back, or differ from the one of the last writer
        first = max(now(), self.newest + _TICK)
        self.newest = first + rows.num_rows * _TICK
        return stamp(rows, first)

    def _fresh(self, rows: pa.Table, sizes: Sequence[int], seen: Seen | None) -> pa.Table:
        """Return the rows that are not stored; `sizes` are those of the parts they came in."""
        places, hashes = self._keys.fresh(rows, self.dataset, seen)
        ends = np.searchsorted(places, np.cumsum(sizes))
        kept = np.diff(ends, prepend=0).tolist()
        self.counts += [(n, size - n) for n, size in zip(kept, sizes, strict=True)]
        self.hashes += hashes
        fresh = rows if len(places) == rows.num_rows else rows.take(pa.array(places))
        latest = newest(fresh)
        if latest > self._latest:
            raise SchemaError(
                f"column `created_at` of `{self.declared.name}` is {latest:%Y-%m-%d %H:%M}, "
                f"more than a day after now ({now():%Y-%m-%d %H:%M}); correct it, or leave it out"
            )
        self.newest = max(self.newest, latest)
        # last: a digest covers the row as it is stored, its time included
        return with_digests(fresh) if self.declared.is_digested else fresh


def append_all(store: WritableTables, name: str, parts: Sequence[Rows]) -> list[Appended]:
    """Append the rows of several writers, in order, in one commit; return each result."""
    declared = table(name)
    rows = [check(declared, part) for part in parts]  # before the lock: others wait for it
    write = store._write  # pyright: ignore[reportPrivateUsage]  a function, to be no verb of `Store`
    writing = _tried(lambda: write(name, lambda new: new.together(rows)))
    return [Appended(n, already, writing.dataset.version) for n, already in writing.counts]


def _filled(rows: pa.Table) -> pa.Table:
    """Drop columns that are NULL in every row: columns that are not stored read as NULL."""
    columns = zip(rows.column_names, rows.columns, strict=True)
    return rows.select([name for name, values in columns if values.null_count < len(values)])


def _tried(write: Callable[[], _Writing]) -> _Writing:
    """Call `write`, again a few times while the store is busy."""
    deadline = monotonic() + LOCK_SECONDS
    for tried in range(1, TRIES + 1):
        try:
            return write()
        except BusyError:
            if tried == TRIES or monotonic() >= deadline:
                raise
            # random: writers that collided once would collide again
            sleep(_PAUSE_SECONDS * 2**tried * random.uniform(0.5, 1.0))
    raise AssertionError("the last try returns or raises")
