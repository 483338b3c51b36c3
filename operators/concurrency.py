"""Concurrent calls, of functions plain or `async`: many rows, timeouts, limits that are shared."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from .user_errors import one_line

T = TypeVar("T")
Row = TypeVar("Row")

# A semaphore belongs to one event loop, and operators run each batch in a loop of its own.
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)


def answers(
    function: Callable[[Row], T | Awaitable[T]],
    rows: Iterable[Row],
    *,
    max_concurrency: int = 16,
    timeout: float = 60.0,
) -> list[tuple[T | None, str | None]]:
    """Call a function, plain or `async`, with each row; return `(answer, error)` for each.

    They are in the order of the rows; one of the two is None. At most `max_concurrency` calls of an
    `async` function run at once, each for `timeout` seconds.

    >>> answers(lambda x: 6 / x, [2, 0])
    [(3.0, None), (None, 'ZeroDivisionError: division by zero')]
    """

    todo, made = enumerate(rows), dict[int, tuple[T | None, str | None]]()

    async def some_of_them() -> None:
        # workers share the iterator, so no more rows are read than there are calls in flight
        for i, row in todo:
            made[i] = await _one(function, row, timeout)

    async def all_of_them() -> None:
        await asyncio.gather(*(some_of_them() for _ in range(max_concurrency)))

    run_apart(all_of_them())
    return [made[i] for i in range(len(made))]


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where this thread's own event loop is running."""
    # A notebook's thread runs an event loop already, and loops cannot be nested.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, work).result()


async def _one(
    function: Callable[[Row], T | Awaitable[T]], row: Row, timeout: float
) -> tuple[T | None, str | None]:
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            made = function(row)
            return (await made if isawaitable(made) else made), None
    except (Exception, asyncio.CancelledError) as error:  # the boundary of user code
        # a client that gives up raises CancelledError too, and that is an error of its row; only a
        # cancellation of this task must go on
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        late = f"TimeoutError: it took longer than {timeout:g} s"
        return None, late if limit.expired() else one_line(error)


def shared_semaphore(name: Hashable, limit: int) -> asyncio.Semaphore:
    """Return the running loop's semaphore of this name, which admits `limit` calls at once.

    >>> async def is_shared():
    ...     return shared_semaphore("judge", 2) is shared_semaphore("judge", 2)
    >>> asyncio.run(is_shared())
    True
    """
    known = _semaphores.setdefault(asyncio.get_running_loop(), {})
    return known.setdefault((name, limit), asyncio.Semaphore(limit))
