"""One thread with an event loop that lives as long as the process, for what jobs' loops share."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_starting = threading.Lock()
_started: list[asyncio.AbstractEventLoop] = []


def shared_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of the thread, which is started when it is first asked for."""
    with _starting:
        if not _started:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="rlake-network", daemon=True).start()
            _started.append(loop)
        return _started[0]


async def run_on(work: Coroutine[Any, Any, T]) -> T:
    """Await something in the background's loop; who gives up here cancels it there."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, shared_loop()))
