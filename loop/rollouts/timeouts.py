"""How long a try may take, and what becomes of one that takes longer."""

import asyncio
import logging
from dataclasses import dataclass
from typing import TypeVar

from ...store.errors import JobError
from ..inference.cancellation import GRACE_SECONDS, CancelScope, on_cancel

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass
class RolloutTimer:
    """How long the tries of a job took, and so how long one may take."""

    ratio: float | None = None
    """A try may take so many times the mean of those before it; None: there is no such limit."""
    after: int = 20
    """Tries that are waited for before that limit holds."""
    _count: int = 0
    _seconds: float = 0.0

    def note(self, seconds: float) -> None:
        """Count a try that ended by itself."""
        self._count += 1
        self._seconds += seconds

    def limit(self, most: float | None) -> float | None:
        """Return how many seconds a try may take, `most` at most."""
        if self.ratio is None or self._count < self.after:
            return most
        found = self.ratio * self._seconds / self._count
        return found if most is None else min(most, found)


async def run_with_timeout(
    work: "asyncio.Future[T]", seconds: float | None, stop: CancelScope
) -> T:
    """Wait for a workflow; one that takes too long is stopped, and then cancelled.

    One that is stopped meanwhile is cancelled too, when it does not end by itself. Raises JobError
    for one that had to be cancelled.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not stopped.done():
            stopped.set_result(None)

    with on_cancel(tell):
        try:
            done, _ = await asyncio.wait(
                {work, stopped}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                stop.set(f"workflow failed: it took longer than {seconds:g} s")
            if work not in done:
                await asyncio.wait({work}, timeout=GRACE_SECONDS)
            if work.done():
                return work.result()
        except asyncio.CancelledError:
            work.cancel()
            raise
    work.cancel()
    await asyncio.wait({work}, timeout=GRACE_SECONDS)
    if not work.done():
        _log.warning("a workflow goes on though it was cancelled")
    raise JobError("it did not end when it was stopped")
