"""Bounds on what is done at once, which all tries of a job share."""

import asyncio
from weakref import WeakKeyDictionary

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
