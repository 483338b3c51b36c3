"""The store: versioned tables to append to, scan, query, and look at as they were."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import quote

import duckdb
import lance
import polars as pl

from . import branches, maintenance, migrations, side_columns, snapshots, user_tables
from . import search as search_module
from .append import Appended, Appender
from .errors import NotFoundError, QueryError, StarvedError, StoreError, reason
from .group_commit import Committer
from .query import QuerySession, views_sql
from .schema import REFERRING_FIRST, TABLES, table
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
        branch: str | None = None,
    ) -> None:
        self.root = uri
        """The address without a branch."""
        self.branch_name = branch
        self.uri = f"{uri}@{branch}" if branch else uri
        self._lines: dict[str, list[branches.Line]] = {}
        self._options = dict(storage_options or {})
        own = {name: v for name, v in (versions or {}).items() if name in TABLES}
        self._pinned = own if versions is not None else None
        self._pinned_of_user = {n: v for n, v in (versions or {}).items() if n not in TABLES}
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
        return None if "://" in self.root else Path(self.root)

    @property
    def runs_folder(self) -> Path | None:
        """Where runs keep checkpoints and weights; those of a branch have a folder of their own."""
        runs = f"runs@{self.branch_name}" if self.branch_name else "runs"
        return None if self.folder is None else self.folder / runs

    @property
    def storage_options(self) -> dict[str, str] | None:
        """What was given to reach a store that lives elsewhere."""
        return self._options or None

    # reading

    def dataset(self, name: str) -> lance.LanceDataset:
        """Return a table as a Lance dataset at its newest (or pinned) version."""
        table(name)
        if self._pinned is not None:
            return self.open_at(name, self._pinned[name])
        handle, newest = self._handles.get(name), self._newest(name)
        if handle is None or handle.version != newest:
            handle = self._handles[name] = self._open(name, branches.place(self, name), newest)
        return handle

    def open_at(self, name: str, version: int | None = None) -> lance.LanceDataset:
        """Open a table at a version of its own, whatever this store is pinned to."""
        return self._open(name, branches.place(self, name, version), version)

    def _open(self, name: str, address: str, version: int | None) -> lance.LanceDataset:
        with self._opening(name):
            return lance.dataset(address, version=version, storage_options=self.storage_options)

    @contextmanager
    def _opening(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise StoreError(
                f"cannot open table `{name}` of `{self.uri}`: {reason(error)}"
            ) from error

    def _newest(self, name: str) -> int:
        """Return the number of a table's newest version.

        By a path Lance lists all versions to find it; by this kind of address it starts from the
        one noted last, whatever their number. (It reads rows slower, so it is for this only.)
        """
        watched = self._watched.get(name)
        if watched is None:
            address = self._quoted(branches.place(self, name))
            watched = self._watched[name] = self._open(name, address, None)
        with self._opening(name):
            return watched.latest_version

    def open_for_names(self, name: str) -> lance.LanceDataset:
        """Open a table to make or drop tags and branches of it.

        By a path Lance makes folders for them where the path leads when it is quoted as in a URL.
        """
        return self._open(name, self._quoted(branches.place(self, name)), None)

    def _quoted(self, address: str) -> str:
        return address if self.folder is None else f"file-object-store://{quote(address)}"

    @property
    def _watched(self) -> dict[str, lance.LanceDataset]:
        """This thread's tables that are only asked for their newest version."""
        if not hasattr(self._local, "watched"):
            self._local.watched = {}
        return self._local.watched

    @property
    def _handles(self) -> dict[str, lance.LanceDataset]:
        """This thread's open tables."""
        if not hasattr(self._local, "handles"):
            self._local.handles = {}
        return self._local.handles

    def versions(self) -> dict[str, int]:
        """Return the version of every table."""
        return dict(self._pinned) if self._pinned else self._versions_now()

    def user_versions(self) -> dict[str, int]:
        """Return the version of each `user_*` table that lies in the store's folder."""
        return dict(self._pinned_of_user) if self.is_past else user_tables.versions(self.folder)

    def _shown_at(self, name: str, version: int) -> lance.LanceDataset:
        if name in TABLES:
            return self.open_at(name, version)
        return user_tables.open_at(self.root, name, version)

    def _versions_now(self) -> dict[str, int]:
        """Return versions in which no row refers to one that is missing.

        Writers go on between one table and the next; so what refers to others is looked at first.
        """
        seen = {name: self.dataset(name).version for name in REFERRING_FIRST}
        return {name: seen[name] for name in TABLES}

    def scan(
        self, name: str, *, with_columns: Sequence[str | side_columns.SideColumn] = ()
    ) -> pl.LazyFrame:
        """Return a table as a Polars LazyFrame; filters and columns are pushed down to the files.

        >>> store.scan("tasks").select("prompt_text", "answer").collect().rows()
        [('2+2=', '4')]

        `experiences` may be read with side columns, such as `score:strict@2` or
        `reward=score:strict@2`; `side.parse` says how they are written. Raises QueryError for one
        that is not valid, and NotFoundError for one of which nothing is stored.
        """
        dataset = self.dataset(name)
        frame = pl.scan_pyarrow_dataset(dataset)  # pyright: ignore[reportArgumentType]
        later = migrations.missing(name, dataset.schema)
        frame = migrations.complete(frame, later) if later else frame
        columns = side_columns.parse_all(with_columns)
        if not columns:
            return frame
        if name != "experiences":
            raise QueryError(f"side columns are of `experiences`, and `{name}` has none")
        side_columns.check(self, columns)
        return side_columns.join(self, frame, columns)

    def sql(
        self,
        query: str,
        *,
        allow_files: bool = False,
        timeout: float | None = None,
        **frames: Any,
    ) -> duckdb.DuckDBPyRelation:
        """Return the result of one SELECT over all tables and views, as a DuckDB relation.

        >>> store.sql("SELECT count(*) FROM tasks").fetchall()
        [(1,)]

        Frames (Polars, pandas, Arrow) are joined by the names that they are given here, files
        by their paths when `allow_files` says that the query may read any that this process can.

        >>> wanted = pl.DataFrame({"answer": ["4", "5"]})
        >>> query = "SELECT answer FROM tasks JOIN wanted USING (answer)"
        >>> store.sql(query, wanted=wanted).fetchall()
        [('4',)]

        The relation reads when rows are asked of it: take them before the thread's next `sql`, or
        it shows the store as of then. After `timeout` seconds DuckDB raises InterruptException
        while rows are read. Queries take at most a quarter of the machine's memory, or what
        `RLAKE_SQL_MEMORY` in the environment says.

        Raises QueryError when it does not parse, names what is not there, or tries to write.
        """
        name = "console_of_files" if allow_files else "console"
        console = getattr(self._local, name, None)
        if console is None:
            console = QuerySession(files=allow_files)
            setattr(self._local, name, console)
        console.show(self.versions() | self.user_versions(), self._shown_at)
        console.join(frames)
        return console.sql(query, seconds=timeout)

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
        of_user = user_tables.names(self.folder)
        for name, version in when.items():
            newest = user_tables.open_at(self.root, name) if name in of_user else self.dataset(name)
            if not 1 <= version <= newest.latest_version:
                raise NotFoundError(
                    f"table `{name}` has no version {version}, newest is {newest.version}"
                )
        return Store(
            self.root,
            storage_options=self._options,
            versions=versions,
            branch=self.branch_name,
        )

    def snapshot(self, name: str, *, note: str | None = None) -> None:
        """Name the store as it is now, once; tags keep its versions from clean-up."""
        snapshots.create(self, name, note=note)

    def branch(self, name: str, *, at: str | None = None) -> "Store":
        """Let a branch leave from the store as it is, or was at a snapshot, and return it.

        It costs almost no bytes, shares all rows that there are, and `connect("PLACE@NAME")` opens
        it. What is appended to one is not seen by the other.

        >>> trial = store.branch("trial")
        >>> _ = trial.append("tasks", [Task.ask("4+4=", "8")])
        >>> trial.count("tasks") - store.count("tasks")
        1

        Raises QueryError for a name that is taken or not plain.
        """
        return branches.create(self, name, at=at)

    def on_branch(self, name: str | None) -> "Store":
        """Return this store on a branch that there is, or with None on its main line."""
        return Store(self.root, storage_options=self._options, branch=name)

    def lines(self, name: str) -> list[branches.Line]:
        """Return the lines that a table of this branch left from, nearest first."""
        if name not in self._lines:
            self._lines[name] = branches.lines(self, name)
        return self._lines[name]

    def lock_name(self, name: str) -> str:
        """Return what a lock is called here: those of a branch are its own."""
        return f"{name}.{self.branch_name}" if self.branch_name else name

    # writing

    def append(self, name: str, data: Rows) -> Appended:
        """Append rows to a table in one commit, and return when they are stored.

        Rows are checked against the declared columns. A row that is stored already (same id, same
        content) is left out, so that a retry is harmless.

        Raises SchemaError for rows that do not fit, ConflictError for the id of a stored row with
        other content, StoreError when they could not be written. Then nothing is stored.
        """
        return self._appender.append(name, data)

    def append_stream(self, name: str, batches: Iterable[Rows]) -> Appended:
        """Append batches of rows in one commit: all of them, or none when one raises.

        Only one batch at a time is in memory, and a digest of each row.
        """
        return self._appender.append_stream(name, iter(batches))

    def append_streams(self, parts: Mapping[str, Iterable[Rows]]) -> dict[str, Appended]:
        """Append batches of rows to several tables: to all of them, or to none when one raises.

        Each table gets one commit, in the order given.
        """
        return self._appender.append_streams({name: iter(b) for name, b in parts.items()})

    def committer(self, **limits: Any) -> Committer:
        """Return what commits for many threads at once; `Committer` says which limits it has."""
        return Committer(self._appender, **limits)

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

    def maintain(
        self,
        *,
        only_due: bool = False,
        dry_run: bool = False,
        grace: float = maintenance.GRACE_SECONDS,
    ) -> maintenance.Report:
        """Do what a store needs now and then, and tell what it changed, beside readers and writers.

        Rows are deleted for which a retention rule holds, small files merged, indexes made and
        kept up, and old versions removed: but for those that a snapshot or a branch needs, and
        those that were the newest one in the last `grace` seconds, which a reader may hold. Files
        that killed writers left behind go after a day. A `dry_run` only tells. With `only_due`, as
        the trainer calls it, rules are left out, and tables that are in order.

        While another process maintains the store, nothing is done; the report says who.
        """
        return maintenance.maintain(self, only_due=only_due, dry_run=dry_run, grace=grace)

    # finding

    def search(self, text: str, *, k: int = 10, where: str | None = None) -> pl.DataFrame:
        """Return the k experiences whose responses match the words of a text best (BM25).

        >>> store.search("carry the one").columns[:2]
        ['experience_id', 'score']

        `where` is an SQL condition on experiences. Raises QueryError for an empty text.
        """
        return search_module.search(self, text, k=k, where=where)

    def similar(
        self,
        experience_id: str,
        *,
        k: int = 10,
        embedder: str | None = None,
        where: str | None = None,
    ) -> pl.DataFrame:
        """Return the k experiences most like a stored one, by the cosine of their embeddings.

        `embedder` may be left out when there is one only. Raises NotFoundError when the experience
        is not stored, or has no embedding (`rlake embed` makes them).
        """
        return search_module.similar(self, experience_id, k=k, embedder=embedder, where=where)
