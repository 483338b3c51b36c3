"""Queries of pages: off the event loop, shared by browsers, cancelled when nobody waits."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from ...store import Store
from ...store.query import names_read, query_error
from ...store.query_scope import QueryScope
from ...store.schema import TABLES

T = TypeVar("T")
_names_read = lru_cache(256)(names_read)
MAX_ROWS = 1000
"""Rows of a result, unless a page asks for more."""
SECONDS = 30.0
"""Time of a query, or of a function with all its queries, in seconds."""
_BATCH, _MAX_BYTES = 256, 64 << 20
"""Rows read at once, and bytes after which no more are read."""
_CACHED, _CACHED_BYTES = 64, 4 << 20
"""Results that are kept, and the most bytes of one."""
_PACE, _YOUNGEST_SECONDS = 100, 0.9
"""How long a result with a `max_age` is used: so many times as it took, and at least so long."""
_FRESH_SECONDS = 0.4
"""How long an answer about the tables' versions is used, in seconds."""
_THREADS = {"page": 4, "call": 3, "write": 2, "console": 2, "live": 1, "state": 1}
"""Threads by the kind of work, so that people's own SQL never holds up the pages.

One for the curves of live pages and one for the states of runs: each thread opens the tables that
moved for itself."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a query; two columns may have one name. Two browsers may get the same object."""

    columns: list[str]
    types: list[str]
    """DuckDB's names of the types."""
    rows: list[tuple[Any, ...]]
    is_cut: bool
    """Whether there are more rows than were read."""
    nbytes: int = 0
    seconds: float = 0.0
    """How long it took to read them."""

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as mappings."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass
class _Running:
    """A query that runs, and those who wait for it."""

    scope: QueryScope
    future: "asyncio.Future[Rows]" = field(init=False)
    waiting: int = 0


class Queries:
    """Runs SQL and functions over a store for pages; for one event loop.

    The result of a query is kept until a table that it reads changes, so twenty browsers that watch
    a run cost as many queries as one.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._pools = {name: ThreadPoolExecutor(n, name) for name, n in _THREADS.items()}
        self._clock = ThreadPoolExecutor(1, "versions")
        self._seen: tuple[float, Mapping[str, int]] = -_FRESH_SECONDS, {}
        self._asking: asyncio.Future[Mapping[str, int]] | None = None
        self._running: dict[Any, _Running] = {}
        self._scopes: set[QueryScope] = set()
        self._known: OrderedDict[Any, Rows] = OrderedDict()
        self._answers: OrderedDict[Any, tuple[float, asyncio.Future[Any]]] = OrderedDict()
        self._paced: OrderedDict[Any, tuple[float, Rows]] = OrderedDict()
        """Until when a result is used, whatever is written, and the result."""

    async def versions(self) -> Mapping[str, int]:
        """Return the versions of all tables, as of a moment ago at most."""
        if monotonic() - self._seen[0] < _FRESH_SECONDS:
            return self._seen[1]
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().run_in_executor(self._clock, self._versions)
        found = await asyncio.shield(self._asking)
        self._seen = monotonic(), found
        return found

    def wrote(self) -> None:
        """Note that this process wrote: the next query sees it, however soon it comes."""
        self._seen = -_FRESH_SECONDS, {}

    def _versions(self) -> Mapping[str, int]:
        return self.store.versions() | self.store.user_versions()

    async def rows(
        self,
        sql: str,
        *,
        limit: int = MAX_ROWS,
        seconds: float = SECONDS,
        pool: str = "page",
        max_age: float = 0.0,
    ) -> Rows:
        """Return the rows of one SELECT.

        They may be up to `max_age` seconds older than the tables: the older, the longer it takes to
        read them, so that a query of a page that is watched takes 1 % of the time.

        Raises QueryError for SQL that cannot run, StarvedError after `seconds`. When all that wait
        for it are cancelled, so is the query.
        """
        if max_age and (last := self._paced.get((sql, limit))) and monotonic() < last[0]:
            return last[1]
        if max_age:  # whatever the versions are, which takes time to find out
            key, pool = (sql, limit), "state"
        else:
            versions, read = await self.versions(), _names_read(sql)
            of = (v for name, v in versions.items() if name in read or name not in TABLES)
            key = sql, limit, *of
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        query = self._running.get(key)
        if query is None:
            query = self._running[key] = _Running(QueryScope(seconds))
            query.future = self._submit(pool, query.scope, lambda: self._read(sql, limit))
            query.future.add_done_callback(lambda _: self._ended(key, query))
        query.waiting += 1
        try:
            found = await asyncio.shield(query.future)
            if max_age:
                self._pace((sql, limit), found, max_age)
            return found
        finally:
            query.waiting -= 1
            if not query.waiting and not query.future.done():
                self._running.pop(key, None)
                query.scope.cancel()

    def _pace(self, key: Any, found: Rows, longest: float) -> None:
        age = min(max(_PACE * found.seconds, _YOUNGEST_SECONDS), longest)
        self._paced[key] = monotonic() + age, found
        while len(self._paced) > _CACHED:
            self._paced.popitem(last=False)

    def _ended(self, key: Any, query: _Running) -> None:
        if self._running.get(key) is query:
            del self._running[key]
        # asked for its error in any case, or asyncio logs those of queries that nobody waits for
        failed = query.future.cancelled() or query.future.exception() is not None
        is_versioned = len(key) > 2
        if is_versioned and not failed and query.future.result().nbytes <= _CACHED_BYTES:
            self._known[key] = query.future.result()
            while len(self._known) > _CACHED:
                self._known.popitem(last=False)

    def _read(self, sql: str, limit: int) -> Rows:
        began = monotonic()
        relation = self.store.sql(sql)
        columns, types = relation.columns, [str(t) for t in relation.types]
        reader = relation.limit(limit + 1).to_arrow_reader(_BATCH)
        rows, nbytes = _taken(reader, limit)
        is_cut = len(rows) > limit or nbytes > _MAX_BYTES
        took = monotonic() - began
        return Rows(columns, types, rows[:limit], is_cut, nbytes, took)

    def _submit(
        self, pool: str, scope: QueryScope, function: Callable[[], T]
    ) -> "asyncio.Future[T]":
        """Call a function in a thread, within a scope; it ends when the scope is cancelled."""

        def scoped() -> T:
            try:
                with scope:
                    return function()
            except duckdb.Error as error:
                raise query_error(error) from error
            finally:
                self._scopes.discard(scope)

        self._scopes.add(scope)
        return asyncio.get_running_loop().run_in_executor(self._pools[pool], scoped)

    async def shared(self, key: Any, function: Callable[..., T], *args: Any, max_age: float) -> T:
        """Return what a function returns, or returned for that key a moment ago."""
        known = self._answers.get(key)
        if known is None or (known[1].done() and monotonic() > known[0]):
            known = (
                monotonic() + max_age,
                asyncio.ensure_future(self.call(function, *args, pool="state")),
            )
            self._answers[key] = known
            while len(self._answers) > _CACHED:
                self._answers.popitem(last=False)
        return await asyncio.shield(known[1])

    async def call(self, function: Callable[..., T], *args: Any, pool: str = "call") -> T:
        """Return what a function returns, called in a thread.

        Raises StarvedError after `SECONDS`. When the caller is cancelled, the queries of the
        function are too; what it computes between them goes on.
        """
        scope = QueryScope(SECONDS, what="the question")
        future = self._submit(pool, scope, lambda: function(*args))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # asked for its error in any case, or asyncio logs that of one that nobody waits for
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        finally:
            scope.cancel()

    async def keep(self, function: Callable[[], T]) -> T:
        """Return what a function returns that writes: it goes on when nobody waits for it.

        It has no limit of time, and threads of its own, so that people who label wait for no audit.
        """
        return await asyncio.shield(self._submit("write", QueryScope(), function))

    def close(self) -> None:
        """Cancel what runs."""
        for scope in list(self._scopes):
            scope.cancel()
        for pool in (*self._pools.values(), self._clock):
            pool.shutdown(wait=False, cancel_futures=True)


def _taken(reader: pa.RecordBatchReader, limit: int) -> tuple[list[tuple[Any, ...]], int]:
    rows: list[tuple[Any, ...]] = []
    nbytes = 0
    with reader:  # closed, or the thread's next query would be refused
        for batch in reader:
            rows += zip(*map(_plain, batch.columns), strict=True)
            nbytes += batch.nbytes
            if len(rows) > limit or nbytes > _MAX_BYTES:
                break
    return rows, nbytes


def _plain(column: pa.Array) -> list[Any]:
    """Return the values of a column; decimals, which sums of integers are, as numbers."""
    values = column.to_pylist()
    if not pa.types.is_decimal(column.type):
        return values
    to = int if column.type.scale == 0 else float
    return [None if value is None else to(value) for value in values]
