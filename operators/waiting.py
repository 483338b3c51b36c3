"""Waiting for many answers at once: a bounded number of calls, each with its time limit."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from typing import Any, TypeVar

T = TypeVar("T")
Row = TypeVar("Row")


def answers(
    function: Callable[[Row], T | Awaitable[T]],
    rows: Sequence[Row],
    *,
    at_once: int = 16,
    seconds: float = 60.0,
) -> list[tuple[T | None, str | None]]:
    """Call a function, plain or `async`, with each row; return its answers, or what went wrong.

    The answers stand in the order of the rows, each with None, or None with the error as text. At
    most `at_once` calls of an `async` function are under way, each for `seconds` at most.

    >>> answers(lambda x: 6 / x, [2, 0])
    [(3.0, None), (None, 'ZeroDivisionError: division by zero')]
    """

    async def all_of_them() -> list[tuple[T | None, str | None]]:
        free = asyncio.Semaphore(at_once)
        return list(await asyncio.gather(*(_one(function, row, free, seconds) for row in rows)))

    return run_apart(all_of_them())


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where this thread's own event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, work).result()


def told(error: BaseException) -> str:
    """Return an error as the text that is kept of it, in one line.

    >>> told(ValueError("no\\nnumber"))
    'ValueError: no number'
    """
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


async def _one(
    function: Callable[[Row], T | Awaitable[T]], row: Row, free: asyncio.Semaphore, seconds: float
) -> tuple[T | None, str | None]:
    async with free:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                made = function(row)
                return (await made if isawaitable(made) else made), None
        except Exception as error:  # noqa: BLE001 - the boundary of user code: a row with its error
            late = f"TimeoutError: it took longer than {seconds:g} s"
            return None, late if limit.expired() else told(error)
