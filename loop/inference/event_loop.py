"""Background event loops that outlive the event loops of their callers."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

CLOSE_SECONDS = 10.0
"""Longest wait for work under way to end."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class BackgroundLoop:
    """Runs coroutines for other loops and for threads without one, until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, T], *, to_the_end: bool = False) -> T:
        """Await a coroutine there. Cancelling the caller cancels it, unless `to_the_end` is set."""
        future = asyncio.wrap_future(self.submit(work))
        return await (asyncio.shield(future) if to_the_end else future)

    def soon(self, call: Callable[[], object]) -> None:
        """Call a function there without waiting for it."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Cancel work under way and end the thread; abandon a thread that does not react."""
        if self._loop.is_closed():
            return
        try:
            self.submit(_cancel_all()).result(CLOSE_SECONDS)
        except TimeoutError:
            # The loop is not closed, because its thread still runs it.
            _log.warning("gave up waiting for the thread `%s`", self._thread.name)
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        self._loop.close()


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order; the first error, or a cancellation, cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


_starting = threading.Lock()
_network = cache(lambda: BackgroundLoop("rlake-network"))


def shared_loop() -> BackgroundLoop:
    """Return the loop that all jobs of this process share, started on first use."""
    with _starting:  # `cache` alone would let two threads each start one
        return _network()


async def run_on(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine in the shared loop. Cancelling the caller cancels it there."""
    return await shared_loop().run(work)
