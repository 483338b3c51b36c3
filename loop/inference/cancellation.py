"""Ending tries before their end, so that what was sampled until then is kept."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

STOP_SECONDS = 0.5
"""How soon those who wait for tries notice that the run is stopped."""
GRACE_SECONDS = 0.5
"""How long a try that is stopped may still take, to return what it has."""


class CancelScope:
    """Ends the tries that work under it: requests under way are answered with what they have."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why; None: not stopped."""
        self._calls: list[Callable[[], None]] = []

    def set(self, reason: str) -> None:
        """Stop now."""
        if self.reason is None:
            self.reason = reason
            for call in list(self._calls):
                call()

    @contextmanager
    def calls(self, call: Callable[[], None]) -> Iterator[None]:
        """Call this when it is stopped, until the block ends."""
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)


_around: ContextVar[tuple[CancelScope, ...]] = ContextVar("stops", default=())


@contextmanager
def cancel_scope(stop: CancelScope) -> Iterator[None]:
    """Let what is done in the block, and tasks made there, end when `stop` is set."""
    token = _around.set((*_around.get(), stop))
    try:
        yield
    finally:
        _around.reset(token)


def cancel_reason() -> str | None:
    """Return why what works here is stopped; None when it is not."""
    return next((stop.reason for stop in _around.get() if stop.reason is not None), None)


@contextmanager
def on_cancel(call: Callable[[], None]) -> Iterator[None]:
    """Call this when what works here is stopped, until the block ends; now if it is already."""
    with ExitStack() as stack:
        for stop in _around.get():
            stack.enter_context(stop.calls(call))
        if cancel_reason() is not None:
            call()
        yield
