"""An event loop in a thread of its own, for what outlives the loops of those who ask it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

CLOSE_SECONDS = 10.0
"""Longest wait for what is under way to end."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class BackgroundLoop:
    """Runs coroutines for other loops and for threads without one, until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T], *, to_the_end: bool = False) -> T:
        """Await something there; who gives up here cancels it, unless it is done to the end."""
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        return await (asyncio.shield(future) if to_the_end else future)

    def wait(self, work: Coroutine[Any, Any, T], *, seconds: float) -> T:
        """Wait for something there; raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def soon(self, call: Callable[[], object]) -> None:
        """Call something there, and do not wait for it."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Cancel what is under way, and end the thread; one that does not answer is left alone."""
        if self._loop.is_closed():
            return
        try:
            self.wait(_cancel_all(), seconds=CLOSE_SECONDS)
        except TimeoutError:
            _log.warning("gave up waiting for the thread `%s`", self._thread.name)
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
