"""Calls that may be under way at once, whoever makes them: of a sandbox, of an endpoint."""

import asyncio
from collections.abc import Hashable
from weakref import WeakKeyDictionary

_free: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)


def at_most(number: int, of: Hashable) -> asyncio.Semaphore:
    """Return the semaphore that lets `number` calls of something go on within this event loop.

    >>> async def is_one():
    ...     return at_most(2, of="judge") is at_most(2, of="judge")
    >>> asyncio.run(is_one())
    True
    """
    mine = _free.setdefault(asyncio.get_running_loop(), {})
    return mine.setdefault((of, number), asyncio.Semaphore(number))


_Bounds = dict[tuple[str, int], asyncio.Semaphore]


_bounds: WeakKeyDictionary[asyncio.AbstractEventLoop, _Bounds] = WeakKeyDictionary()


def places(kind: str, at_once: int) -> asyncio.Semaphore:
    """Return the bound of `at_once` that has this name in the running loop.

    >>> async def share():
    ...     return places("sandbox", 2) is places("sandbox", 2)
    >>> asyncio.run(share())
    True
    """
    known = _bounds.setdefault(asyncio.get_running_loop(), {})
    return known.setdefault((kind, at_once), asyncio.Semaphore(at_once))
