"""The store: versioned tables to append to, scan, query, and look at as they were."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TypeVar

import duckdb
import lance
import polars as pl

from . import maintenance, snapshots
from .appending import Appended, Appender
from .errors import NotAStoreError, NotFoundError, StarvedError, StoreError, reason
from .query import Console
from .schema import SCHEMA_VERSION, TABLES, table
from .validate import Rows

POLL_SECONDS = 0.025
"""How often a waiter looks for commits of other processes; those of its own wake it at once."""

T = TypeVar("T")


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
        self._appender = Appender(self)
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Store({self.uri!r}{', pinned' if self._pinned else ''})"

    @property
    def is_past(self) -> bool:
        """Whether this shows the store as it was, and so cannot be written."""
        return self._pinned is not None

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
        when = snapshots.find(self, when).versions if isinstance(when, str) else when
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
        snapshots.create(self, name, note=note)

    # writing

    def append(self, name: str, data: Rows) -> Appended:
        """Append rows to a table in one commit, and return when they are stored.

        Rows are checked against the declared columns. A row that is stored already (same id, same
        content) is left out, so that a retry is harmless.

        Raises SchemaError for rows that do not fit, ConflictError for the id of a stored row with
        other content, StoreError when they could not be written. Then nothing is stored.
        """
        return self._appender.append(name, iter([data]), stream=False)

    def append_stream(self, name: str, batches: Iterable[Rows]) -> Appended:
        """Append batches of rows in one commit: all of them, or none when one raises.

        Only one batch at a time is in memory, and a digest of each row.
        """
        return self._appender.append(name, iter(batches), stream=True)

    def committed(self, name: str, dataset: lance.LanceDataset) -> None:
        """Take note of a commit of this process: its new version, and whoever waits for one."""
        self._handles[name] = dataset
        with self._changed:
            self._changed.notify_all()

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
        return maintenance.maintain(self)

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
