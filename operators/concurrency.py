"""Limits on concurrent calls that share a resource, whichever object makes them."""

import asyncio
from collections.abc import Hashable
from weakref import WeakKeyDictionary

# A semaphore belongs to one event loop, and operators run each batch in a loop of its own.
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)


def shared_semaphore(name: Hashable, limit: int) -> asyncio.Semaphore:
    """Return the running loop's semaphore of this name, which admits `limit` calls at once.

    >>> async def is_shared():
    ...     return shared_semaphore("judge", 2) is shared_semaphore("judge", 2)
    >>> asyncio.run(is_shared())
    True
    """
    known = _semaphores.setdefault(asyncio.get_running_loop(), {})
    return known.setdefault((name, limit), asyncio.Semaphore(limit))
