"""The store: versioned tables to append to, scan, query, and look at as they were."""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TypeVar

import duckdb
import lance
import polars as pl
import pyarrow as pa

from .errors import (
    NotAStoreError,
    NotFoundError,
    QueryError,
    StarvedError,
    StoreError,
    nearest,
    reason,
)
from .keys import KeyIndex, Seen
from .locks import locked
from .query import Console
from .schema import SCHEMA_VERSION, TABLES, Table, table
from .validate import Rows, conform

POLL_SECONDS = 0.025
"""How often a waiter looks for commits of other processes; those of its own wake it at once."""

_ROWS_A_FILE = 65_536

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Appended:
    """What an append did: rows written, rows that were there already, and the table's version."""

    rows: int
    already: int
    version: int


class Store:
    """Versioned tables in one place. Made by `connect`; `at` gives the same store as it was."""

    def __init__(
        self,
        uri: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        self.uri = uri
        self._options = dict(storage_options or {})
        self._pinned = dict(versions) if versions is not None else None
        self._local = threading.local()  # Lance handles and DuckDB sessions are for one thread
        self._keys = {name: KeyIndex(TABLES[name]) for name in TABLES}
        self._writing = {name: threading.Lock() for name in TABLES}
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Store({self.uri!r}{', pinned' if self._pinned else ''})"

    @property
    def folder(self) -> Path | None:
        """The local folder, or None when the store lives elsewhere."""
        return None if "://" in self.uri else Path(self.uri)

    # reading

    def dataset(self, name: str) -> lance.LanceDataset:
        """Return a table as a Lance dataset at its newest (or pinned) version."""
        table(name)
        if self._pinned is not None:
            return self.open_at(name, self._pinned[name])
        handle = self._handles.get(name)
        if handle is None or handle.latest_version != handle.version:
            handle = self._handles[name] = self.open_at(name)
        return handle

    def open_at(self, name: str, version: int | None = None) -> lance.LanceDataset:
        """Open a table at a version of its own, whatever this store is pinned to."""
        try:
            return lance.dataset(
                f"{self.uri}/{name}.lance", version=version, storage_options=self._options or None
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise StoreError(
                f"cannot open table `{name}` of `{self.uri}`: {reason(error)}"
            ) from error

    @property
    def _handles(self) -> dict[str, lance.LanceDataset]:
        """This thread's open tables."""
        if not hasattr(self._local, "handles"):
            self._local.handles = {}
        return self._local.handles

    def versions(self) -> dict[str, int]:
        """Return the version of every table."""
        return dict(self._pinned) if self._pinned else {n: self.dataset(n).version for n in TABLES}

    def scan(self, name: str) -> pl.LazyFrame:
        """Return a table as a Polars LazyFrame; filters and columns are pushed down to the files.

        >>> store.scan("tasks").select("prompt_text", "answer").collect().rows()
        [('2+2=', '4')]
        """
        return pl.scan_pyarrow_dataset(self.dataset(name))  # pyright: ignore[reportArgumentType]

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """Return the result of one SELECT over all tables and views, as a DuckDB relation.

        >>> store.sql("SELECT count(*) FROM tasks").fetchall()
        [(1,)]

        The relation reads when rows are asked of it: take them before the thread's next `sql`, or
        it shows the store as of then. Raises QueryError when it does not parse, names what is
        not there, or tries to write.
        """
        console = getattr(self._local, "console", None)
        if console is None:
            console = self._local.console = Console()
        console.show(self.versions(), self.open_at)
        return console.sql(query)

    def count(self, name: str) -> int:
        """Return the number of rows of a table."""
        return self.dataset(name).count_rows()

    # time

    def at(self, when: str | Mapping[str, int]) -> "Store":
        """Return the store as it was, read only: at a snapshot's name, or at versions by table.

        >>> store.snapshot("before")
        >>> _ = store.append("tasks", [Task.ask("3+3=", "6")])
        >>> store.at("before").count("tasks"), store.count("tasks")
        (1, 2)
        """
        if isinstance(when, str):
            named = {r["name"]: r["tables"] for r in self.scan("snapshots").collect().to_dicts()}
            if when not in named:
                raise NotFoundError(f"there is no snapshot `{when}`{nearest(when, named)}")
            when = {p["name"]: p["version"] for p in named[when]}
        versions = {**self.versions(), **when}
        for name, version in when.items():
            if not 1 <= version <= self.dataset(name).latest_version:
                raise NotFoundError(
                    f"table `{name}` has no version {version}, newest is "
                    f"{self.dataset(name).version}"
                )
        return Store(self.uri, storage_options=self._options, versions=versions)

    def snapshot(self, name: str, *, note: str | None = None) -> None:
        """Name the store as it is now, once; tags keep its versions from clean-up."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise QueryError(
                f"a snapshot cannot be called {name!r}: use letters, digits, `.`, `-` and `_`"
            )
        if name in set(self.scan("snapshots").select("name").collect().to_series()):
            raise QueryError(f"snapshot `{name}` exists already; choose another name")
        versions = self.versions()
        for table_name, version in versions.items():
            tags = self.dataset(table_name).tags
            if f"snapshot-{name}" in tags.list():  # by one that was killed before it was done
                tags.delete(f"snapshot-{name}")
            tags.create(f"snapshot-{name}", version)
        tables = [{"name": n, "version": v} for n, v in versions.items()]
        self.append("snapshots", [{"name": name, "tables": tables, "note": note}])

    # writing

    def append(self, name: str, data: Rows) -> Appended:
        """Append rows to a table in one commit, and return when they are stored.

        Rows are checked against the declared columns. A row that is stored already (same id, same
        content) is left out, so that a retry is harmless.

        Raises SchemaError for rows that do not fit, ConflictError for the id of a stored row with
        other content, StoreError when they could not be written. Then nothing is stored.
        """
        return self._append(name, iter([data]), seen=None)

    def append_stream(self, name: str, batches: Iterable[Rows]) -> Appended:
        """Append batches of rows in one commit: all of them, or none when one raises.

        Only one batch at a time is in memory, and a digest of each row.
        """
        return self._append(name, iter(batches), seen={})

    def _append(self, name: str, batches: Iterator[Rows], *, seen: Seen | None) -> Appended:
        declared = table(name)
        if self._pinned is not None:
            raise StoreError(
                f"{self!r} is read only: it shows the past; append to the store itself"
            )
        keys = self._keys[name]
        with self._writing[name], locked(self.folder, name):
            dataset = self.dataset(name)
            keys.refresh(dataset)
            writing = _Writing(declared, keys, dataset, seen)
            fresh = writing.batches(batches)
            first = next(fresh, None)
            if first is not None:
                dataset = self._commit(name, dataset, writing, _chain(first, fresh))
        with self._changed:
            self._changed.notify_all()
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
            self._handles.pop(name, None)
            if writing.error is not None:
                raise writing.error from None
            raise StoreError(
                f"cannot write to `{name}`: {reason(error)}; nothing was stored"
            ) from error
        assert isinstance(written, lance.LanceDataset)
        self._handles[name] = written
        if written.version == dataset.version + 1:  # else others wrote too: the next one looks
            self._keys[name].committed(written, writing.hashes)
        return written

    # waiting, care

    def wait_for(
        self,
        look: Callable[[], T | None],
        *,
        tables: Sequence[str],
        seconds: float,
        describe: Callable[[], str],
        stop: threading.Event | None = None,
    ) -> T:
        """Call `look` now, and after each commit to one of `tables`, until it gives something.

        Commits of this process wake it at once, those of others within POLL_SECONDS. Raises
        StarvedError with what `describe` says after `seconds`, or as soon as `stop` is set.
        """
        deadline = monotonic() + seconds
        while True:
            seen = {name: self.dataset(name).version for name in tables}
            found = look()
            if found is not None:
                return found
            while seen == {name: self.dataset(name).version for name in tables}:
                left = deadline - monotonic()
                if stop is not None and stop.is_set():
                    raise StarvedError(f"the run was stopped: {describe()}")
                if left <= 0:
                    raise StarvedError(f"gave up after {seconds:g} s: {describe()}")
                with self._changed:
                    self._changed.wait(min(left, POLL_SECONDS))

    def maintain(self) -> dict[str, tuple[int, int]]:
        """Merge small files of each table; return fragments before and after, by table.

        Safe beside readers and writers. A table that another process is merging is left to it.
        """
        report = {}
        for name in TABLES:
            dataset = self.open_at(name)
            before = len(dataset.get_fragments())
            if before > 1:
                self._merge(dataset)
            report[name] = (before, len(self.open_at(name).get_fragments()))
        return report

    def _merge(self, dataset: lance.LanceDataset) -> None:
        try:
            # files of this size are left alone, so that a row is not rewritten for ever
            dataset.optimize.compact_files(target_rows_per_fragment=_ROWS_A_FILE)
        except (OSError, RuntimeError) as error:
            if "conflict" not in str(error).lower():
                raise StoreError(f"cannot merge the files of `{dataset.uri}`: {error}") from error
            _log.info("left the files of `%s` to another process that merges them", dataset.uri)

    def check_schema(self, name: str) -> None:
        """Raise NotAStoreError when a table is not ours, or of a newer schema."""
        meta = self.open_at(name).schema.metadata or {}
        version = int(meta.get(b"rlake.schema_version", b"0"))
        if version == 0:
            raise NotAStoreError(f"`{self.uri}` holds tables that rlake did not make")
        if version > SCHEMA_VERSION:
            raise NotAStoreError(
                f"`{self.uri}` has schema {version}, this rlake reads up to {SCHEMA_VERSION}; "
                "upgrade it with `pip install --upgrade rlake`"
            )


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
