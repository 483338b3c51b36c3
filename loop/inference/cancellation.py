"""Ending rollouts early, while keeping what was sampled so far."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

STOP_SECONDS = 0.5
"""How soon a wait for rollouts notices that the run is stopped."""
GRACE_SECONDS = 0.5
"""Time for a cancelled rollout to return what it has."""


class CancelScope:
    """Ends the rollouts in it: requests under way are answered with the tokens so far."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """The reason for the cancellation; None: not cancelled."""
        self.calls: list[Callable[[], None]] = []
        """Called on cancellation."""

    def set(self, reason: str) -> None:
        """Cancel now; the first reason stays."""
        if self.reason is None:
            self.reason = reason
            # A copy: a call may end its `on_cancel` block, which removes it from the list.
            for call in list(self.calls):
                call()


# Of the context, not of a call: tasks that a workflow creates inherit it.
_scopes: ContextVar[tuple[CancelScope, ...]] = ContextVar("cancel_scopes", default=())


@contextmanager
def cancel_scope(scope: CancelScope) -> Iterator[None]:
    """Run the block, and tasks created in it, in a scope."""
    token = _scopes.set((*_scopes.get(), scope))
    try:
        yield
    finally:
        _scopes.reset(token)


def cancel_reason() -> str | None:
    """Return the cancellation reason of the current scope, or None."""
    for scope in _scopes.get():
        if scope.reason is not None:
            return scope.reason
    return None


@contextmanager
def on_cancel(call: Callable[[], None]) -> Iterator[None]:
    """Call a function on cancellation, until the block ends; at once if it is cancelled already."""
    scopes = _scopes.get()
    for scope in scopes:
        scope.calls.append(call)
    try:
        # after the registration, so that a cancellation in between is not missed
        if cancel_reason() is not None:
            call()
        yield
    finally:
        for scope in scopes:
            scope.calls.remove(call)
