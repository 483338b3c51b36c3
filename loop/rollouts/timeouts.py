"""The longest time of a rollout, and cancelling one that takes longer."""

import asyncio
import logging
from dataclasses import dataclass
from typing import TypeVar

from ...store.errors import JobError
from ..inference.cancellation import GRACE_SECONDS, CancelScope, cancel_reason, on_cancel

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass
class RolloutTimer:
    """Derives the timeout of a job's rollouts from how long earlier ones took."""

    multiplier: float | None = None
    """A rollout may take this many times the mean of earlier ones; None: no such limit."""
    min_samples: int = 20
    """Rollouts that must finish before the limit applies."""
    _count: int = 0
    _seconds: float = 0.0

    def note(self, seconds: float) -> None:
        """Count a rollout that ended by itself."""
        self._count += 1
        self._seconds += seconds

    def limit(self, most: float | None) -> float | None:
        """Return how many seconds a rollout may take, `most` at most."""
        if self.multiplier is None or self._count < self.min_samples:
            return most
        found = self.multiplier * self._seconds / self._count
        return found if most is None else min(most, found)


def cut_short(timeout: CancelScope) -> tuple[str, str] | None:
    """Return the drop reason and finish reason of a rollout that was cancelled."""
    if timeout.reason is not None:
        return timeout.reason, "timeout"
    outer = cancel_reason()
    return None if outer is None else (f"stopped: {outer}", "abort")


async def run_with_timeout(
    work: "asyncio.Future[T]", seconds: float | None, stop: CancelScope
) -> T:
    """Await a workflow, and cancel its scope after a timeout.

    A workflow whose scope is cancelled has GRACE_SECONDS to return what it has; then its task is
    cancelled. Raises JobError for a workflow that had to be cancelled.
    """
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    def expire() -> None:
        if not woken.done():  # neither ended nor cancelled from outside
            stop.set(f"workflow failed: it took longer than {seconds:g} s")
            wake()

    timer = None if seconds is None else loop.call_later(seconds, expire)
    # not `asyncio.wait`, which costs as much as the rest of a short rollout
    work.add_done_callback(wake)
    with on_cancel(wake):
        try:
            await woken
            if not work.done():  # it may still return what it has
                await asyncio.wait({work}, timeout=GRACE_SECONDS)
            if work.done():
                return work.result()
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
    work.cancel()
    await asyncio.wait({work}, timeout=GRACE_SECONDS)
    if not work.done():
        _log.warning("a workflow continues although it was cancelled")
    raise JobError("it did not end when it was stopped")
