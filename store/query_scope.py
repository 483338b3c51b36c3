"""Query scopes: the queries of a block can be cancelled by another thread, and end after a time."""

import threading
from collections.abc import Callable
from contextvars import ContextVar, Token
from types import TracebackType

from .errors import StarvedError

_current: ContextVar["QueryScope | None"] = ContextVar("query_scope", default=None)
_AGAIN_SECONDS = 0.05
"""How often queries are interrupted again: DuckDB forgets an interrupt before it begins to read."""


class QueryScope:
    """The queries that a thread runs within a block, with their longest time in all, in seconds.

    >>> with QueryScope(seconds=30):
    ...     store.sql("SELECT count(*) FROM tasks").fetchall()
    [(1,)]

    Cancelled, or out of time, the query that is being read raises `duckdb.InterruptException`, and
    the next one StarvedError, so that a function of many queries ends too; `what` is what their
    errors name. Serves one block.
    """

    def __init__(self, seconds: float | None = None, *, what: str = "the query") -> None:
        self._seconds, self._what = seconds, what
        self._why: str | None = None
        self._interrupts: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._woken, self._closed = threading.Event(), threading.Event()
        self._token: Token[QueryScope | None] | None = None

    def __enter__(self) -> "QueryScope":
        """Make it the scope of this thread, and begin to count its time.

        Raises StarvedError if it was cancelled before.
        """
        self.check()
        self._token = _current.set(self)
        threading.Thread(target=self._watch, name="query-scope", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it; raise StarvedError in place of the error that came of its end."""
        if self._token is not None:
            _current.reset(self._token)
        with self._lock:  # the thread's next queries are not interrupted
            self._closed.set()
            self._interrupts.clear()
        self._woken.set()
        # Arrow and our own errors too: they are made of the one by which DuckDB ended a query
        if isinstance(error, Exception) and self._why is not None:
            raise StarvedError(self._why) from error

    def cancel(self) -> None:
        """End the queries of the block; any thread may call it, before the block begins too."""
        self._why = self._why or f"{self._what} was cancelled"
        self._woken.set()

    def check(self) -> None:
        """Raise StarvedError if it was cancelled or its time is up."""
        if self._why is not None:
            raise StarvedError(self._why)

    def add(self, interrupt: Callable[[], None]) -> None:
        """Let it end a query by this function."""
        self.check()
        with self._lock:
            if interrupt not in self._interrupts:
                self._interrupts.append(interrupt)

    def _watch(self) -> None:
        if not self._woken.wait(self._seconds):
            late = f"{self._what} took longer than it was given ({self._seconds:g} s)"
            self._why = self._why or f"{late}; ask for less, or give it more"
        while not self._closed.is_set():
            with self._lock:
                for interrupt in self._interrupts:
                    interrupt()
            self._closed.wait(_AGAIN_SECONDS)


def check() -> None:
    """Raise StarvedError if the scope of this thread was cancelled: for loops without queries."""
    if (scope := _current.get()) is not None:
        scope.check()


def join(interrupt: Callable[[], None]) -> None:
    """Let the scope of this thread, if there is one, end a query by this function."""
    if (scope := _current.get()) is not None:
        scope.add(interrupt)
