"""The tables of one store: their addresses, their versions, and SQL over them."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

import duckdb
import lance

from . import schema_versions, user_tables
from .blobs import readable
from .errors import StarvedError, StoreError, as_store_error
from .query import QuerySession, views_sql
from .schema import REFERRING_FIRST, TABLES, table

if TYPE_CHECKING:
    import polars as pl

LAST = "job_events"
"""The table that is created, branched and migrated last: when it is done, all others are."""
IN_ORDER = tuple(sorted(TABLES, key=LAST.__eq__))
"""Tables in the order in which they are created."""
POLL_SECONDS = 0.025
"""How often a waiter polls for commits of other processes; those of its own wake it at once."""

_SETTLED = 50_000_000
"""Nanoseconds after which a folder's time of change is not given to another change."""

Line = tuple[str | None, int]
"""A branch (None: the main line), and its newest version that another branch shares."""

T = TypeVar("T")


class _OfThread(threading.local):
    """Each thread's own objects: Lance handles and DuckDB sessions are not thread-safe."""

    def __init__(self) -> None:
        self.handles: dict[str, lance.LanceDataset] = {}
        self.watched: dict[str, lance.LanceDataset] = {}
        """Tables that are only asked for their newest version."""
        self.newest: dict[str, tuple[int, int]] = {}
        """When a table's list of versions last changed, and the newest of them."""
        self.consoles: dict[bool, QuerySession] = {}
        """SQL sessions, by whether they may read files."""


class Tables:
    """Versioned tables in one place: every operation on them except writing rows.

    Modules that work on a store take this class; `Store` extends it and calls them.
    """

    def __init__(
        self,
        uri: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        versions: Mapping[str, int] | None = None,
        branch: str | None = None,
    ) -> None:
        self.root = uri
        """The address without a branch."""
        self.branch_name = branch
        self._is_local = "://" not in uri
        self.uri = f"{uri}@{branch}" if branch else uri
        self._lines: dict[str, list[Line]] = {}
        self._options = dict(storage_options or {})
        own = {name: v for name, v in (versions or {}).items() if name in TABLES}
        self._pinned = own if versions is not None else None
        self._pinned_of_user = {n: v for n, v in (versions or {}).items() if n not in TABLES}
        self._local = _OfThread()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r}{', pinned' if self._pinned else ''})"

    @property
    def is_past(self) -> bool:
        """Whether this is a past state of the store, which cannot be written."""
        return self._pinned is not None

    @property
    def folder(self) -> Path | None:
        """The local folder, or None when the store lives elsewhere."""
        return Path(self.root) if self._is_local else None

    @property
    def runs_folder(self) -> Path | None:
        """The folder of checkpoints and weights; each branch has its own."""
        runs = f"runs@{self.branch_name}" if self.branch_name else "runs"
        return None if self.folder is None else self.folder / runs

    @property
    def storage_options(self) -> dict[str, str] | None:
        """The options given to reach a store on an object store."""
        return self._options or None

    # reading

    def dataset(self, name: str, *, to_write: bool = False) -> lance.LanceDataset:
        """Return a table as a Lance dataset at its newest (or pinned) version.

        `to_write` says that a missed version would do harm: then no cache is trusted.
        """
        table(name)
        if self._pinned is not None:
            return self.open_at(name, self._pinned[name])
        # a handle shows the version that it was opened at, whatever others have written since
        newest = self._ask_newest(name) if to_write else self.newest_version(name)
        handle = self._local.handles.get(name)
        if handle is None or handle.version != newest:
            handle = self._local.handles[name] = self._open(name, self._place(name), newest)
        return handle

    def open_at(self, name: str, version: int | None = None) -> lance.LanceDataset:
        """Open a table at a version (None: the newest), whatever this store is pinned to."""
        return self._open(name, self._place(name, version), version)

    def _open(self, name: str, address: str, version: int | None) -> lance.LanceDataset:
        with as_store_error(self._cannot_open(name)):
            return lance.dataset(address, version=version, storage_options=self.storage_options)

    def _cannot_open(self, name: str) -> str:
        return f"cannot open table `{name}` of `{self.uri}`"

    def newest_version(self, name: str) -> int:
        """Return the number of a table's newest version."""
        now = time_ns()
        changed = _changed_at(f"{self._place(name)}/_versions") if self._is_local else None
        known = self._local.newest.get(name)
        if known is not None and known[0] == changed:
            return known[1]
        newest = self._ask_newest(name)
        # Times of files move in steps of up to 10 ms, on some file systems of a second: a version
        # that is written after a recent change may have the time of that change.
        if changed is not None and changed < now - _SETTLED and changed % 1_000_000_000:
            self._local.newest[name] = changed, newest
        return newest

    def _shown(self, name: str) -> int:
        """Return the number of the version that `dataset` returns."""
        return self.newest_version(name) if self._pinned is None else self._pinned[name]

    def _ask_newest(self, name: str) -> int:
        """Ask Lance for a table's newest version.

        Given a path, it lists all versions to find it; given this kind of address, it starts
        from the last known one. (Reading rows through it is slower, so it is used only here.)
        """
        watched = self._local.watched.get(name)
        if watched is None:
            watched = self._local.watched[name] = self.open_for_names(name)
            return watched.version  # just opened: it is the newest
        with as_store_error(self._cannot_open(name)):
            return watched.latest_version

    def open_for_names(self, name: str) -> lance.LanceDataset:
        """Open a table to create or drop its tags and branches.

        Given a path, Lance would create their folders at the path as it is quoted in a URL.
        """
        return self._open(name, self._quoted(self._place(name)), None)

    def _quoted(self, address: str) -> str:
        return address if not self._is_local else f"file-object-store://{quote(address)}"

    def versions(self) -> dict[str, int]:
        """Return versions of all tables in which no row refers to a missing one."""
        if self._pinned:
            return dict(self._pinned)
        # Writers continue while the tables are read, so tables that refer to others are read first.
        # Not by `dataset`: it opens a table that moved, which takes longer than to ask.
        seen = {name: self.newest_version(name) for name in REFERRING_FIRST}
        return {name: seen[name] for name in TABLES}

    def user_versions(self) -> dict[str, int]:
        """Return the version of each `user_*` table that lies in the store's folder."""
        return dict(self._pinned_of_user) if self.is_past else user_tables.versions(self.folder)

    def _shown_at(self, name: str, version: int) -> lance.LanceDataset:
        if name in TABLES:
            return self.open_at(name, version)
        return user_tables.open_at(self.root, name, version)

    def scan(self, name: str) -> "pl.LazyFrame":
        """Return a table as a Polars LazyFrame; filters and columns are pushed down to the files.

        Columns that a version from before lacks are NULL in every row.
        """
        import polars as pl

        dataset = self.dataset(name)
        frame = pl.scan_pyarrow_dataset(readable(name, dataset))  # pyright: ignore[reportArgumentType]
        later = schema_versions.missing(name, dataset.schema)
        return schema_versions.complete(frame, later) if later else frame

    def sql(
        self, query: str, *, allow_files: bool = False, timeout: float | None = None, **frames: Any
    ) -> duckdb.DuckDBPyRelation:
        """Return the result of one SELECT over all tables and views, as a DuckDB relation.

        >>> store.sql("SELECT count(*) FROM tasks").fetchall()
        [(1,)]

        Frames (Polars, pandas, Arrow) are joined by the names that they are given here, files
        by their paths when `allow_files` says that the query may read any that this process can.

        >>> import polars as pl
        >>> wanted = pl.DataFrame({"answer": ["4", "5"]})
        >>> query = "SELECT answer FROM tasks JOIN wanted USING (answer)"
        >>> store.sql(query, wanted=wanted).fetchall()
        [('4',)]

        The relation reads when rows are asked of it: take them before the thread's next `sql`, or
        it shows the store as of then. After `timeout` seconds DuckDB raises InterruptException
        while rows are read; a `QueryScope` ends several queries, and when another thread cancels
        it. Queries take at most a quarter of the machine's memory, or what
        `RLAKE_SQL_MEMORY` in the environment says.

        Raises QueryError when it does not parse, names what does not exist, or would write.
        """
        console = self._local.consoles.get(allow_files)
        if console is None:
            console = self._local.consoles[allow_files] = QuerySession(files=allow_files)
        # of all tables, though the query opens few: a lost one is an error of every query
        console.show(self.versions() | self.user_versions(), self._shown_at)
        console.join(frames)
        return console.sql(query, seconds=timeout)

    def register(self, con: duckdb.DuckDBPyConnection) -> None:
        """Register all tables, views and macros, as they are now, in a DuckDB connection of yours.

        >>> con = duckdb.connect()
        >>> store.register(con)
        >>> con.sql("SELECT count(*) FROM groups").fetchall()
        [(0,)]

        They are temporary. Rows that are appended later are seen after another call.
        """
        session = QuerySession(on=con)
        session.show(self.versions() | self.user_versions(), self._shown_at)
        session.show_all()

    @staticmethod
    def views_sql() -> str:
        """Return the views and macros as plain SQL, for DuckDB without rlake.

        >>> con = duckdb.connect()
        >>> for name in TABLES:
        ...     _ = con.register(name, lance.dataset(f"{store.uri}/{name}.lance"))
        >>> con.execute(store.views_sql()).sql("SELECT count(*) FROM groups").fetchall()
        [(0,)]
        """
        return views_sql()

    def count(self, name: str) -> int:
        """Return the number of rows of a table."""
        return self.dataset(name).count_rows()

    # branches

    def on_branch(self, name: str | None) -> Self:
        """Return this store on a branch that there is, or with None on its main line."""
        return type(self)(self.root, storage_options=self._options, branch=name)

    def lines(self, name: str) -> list[Line]:
        """Return the lines that a table of this branch left from, nearest first."""
        # cached: what a branch was created from never changes
        if name not in self._lines:
            self._lines[name] = list(self._left(name))
        return self._lines[name]

    def _left(self, name: str) -> Iterator[Line]:
        """Yield the lines that a table of this branch came from, nearest first."""
        branch = self.branch_name
        known = known_branches(self, name) if branch else {}
        while branch is not None and branch in known:
            info = known[branch]
            branch = info["parent_branch"]
            yield branch, info["parent_version"]

    def _place(self, name: str, version: int | None = None) -> str:
        """Return where a version of a table lies.

        One that is older than the branch lies on the line that the branch left from.
        """
        branch = self.branch_name
        for parent, newest in self.lines(name) if version is not None else ():
            if version is None or version > newest:
                break
            branch = parent
        return place_on(self, name, branch)

    def lock_name(self, name: str) -> str:
        """Return what a lock is called here: those of a branch are its own."""
        return f"{name}.{self.branch_name}" if self.branch_name else name

    # waiting

    def committed(self, name: str, dataset: lance.LanceDataset) -> None:
        """Note a commit of this process, and wake the threads that wait for one."""
        # the handle first: a waiter that is woken reads the versions at once
        self._local.handles[name] = dataset
        with self._changed:
            self._changed.notify_all()

    def wait_for(
        self,
        look: Callable[[], T | None],
        *,
        tables: Sequence[str],
        seconds: float,
        describe: Callable[[], str],
        stop: threading.Event | None = None,
    ) -> T:
        """Call `look` now and after each commit to one of `tables`, until it returns a value.

        Commits of this process wake it at once, those of others within POLL_SECONDS. Raises
        StarvedError with the text of `describe` after `seconds`, or as soon as `stop` is set.
        """
        deadline = monotonic() + seconds
        while True:
            # read before `look`: a commit during `look` is then noticed, and `look` called again
            # (not by `dataset`: a waiter would open each version, which only `look` may need)
            seen = {name: self._shown(name) for name in tables}
            found = look()
            if found is not None:
                return found
            while seen == {name: self._shown(name) for name in tables}:
                left = deadline - monotonic()
                if stop is not None and stop.is_set():
                    raise StarvedError(f"the run was stopped: {describe()}")
                if left <= 0:
                    raise StarvedError(f"gave up after {seconds:g} s: {describe()}")
                with self._changed:
                    self._changed.wait(min(left, POLL_SECONDS))


def _changed_at(folder: str) -> int | None:
    """Return when entries of a folder last changed, in nanoseconds; None if it cannot be read."""
    try:
        # opened, for network file systems may answer `stat` from a cache
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def check_present(store: Tables, todo: str) -> None:
    """Raise StoreError when a store shows the past; `todo` is what to do with the store itself."""
    if store.is_past:
        raise StoreError(f"{store!r} is read only: it shows the past; {todo} the store itself")


def known_branches(tables: Tables, name: str) -> Mapping[str, Any]:
    """Return what Lance knows of a table's branches."""
    return tables.on_branch(None).open_at(name).branches.list()


def own_place(tables: Tables, name: str) -> str:
    """Return where a table of this branch lies, whatever the version."""
    return place_on(tables, name, tables.branch_name)


def place_on(tables: Tables, name: str, branch: str | None) -> str:
    """Return where a table lies on a branch, or on the main line."""
    root = f"{tables.root}/{name}.lance"
    return f"{root}/tree/{branch}" if branch else root


def tag_prefix(branch: str | None) -> str:
    """Return how the tags of a branch begin; tags are shared by all branches of a table."""
    return f"branch-{branch}." if branch else ""


def newest_named(store: Tables, table: str) -> dict[str, dict[str, Any]]:
    """Return the newest row of each name that was not dropped, by name, oldest first."""
    newest: dict[str, dict[str, Any]] = {}
    for row in store.scan(table).collect().sort("created_at", maintain_order=True).to_dicts():
        newest.pop(row["name"], None)
        if not row["is_dropped"]:
            newest[row["name"]] = row
    return newest


def unfinished(store: Tables, *, running: bool = False) -> list[tuple[str, str]]:
    """Return (run, job) of the jobs that are not done; with `running`, not those that failed.

    A job that was killed could not say so: it counts as running.
    """
    status = "status = 'running'" if running else "status <> 'done'"
    return store.sql(f"SELECT run_id, job FROM runs WHERE {status} ORDER BY run_id, job").fetchall()
