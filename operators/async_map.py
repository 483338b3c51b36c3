"""Waiting for many answers at once: a bounded number of calls, each with its time limit."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from typing import Any, TypeVar

from ..store.records import proper

T = TypeVar("T")
Row = TypeVar("Row")

_LONGEST = 500


def answers(
    function: Callable[[Row], T | Awaitable[T]],
    rows: Iterable[Row],
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

    todo, made = enumerate(rows), dict[int, tuple[T | None, str | None]]()

    async def some_of_them() -> None:
        for i, row in todo:
            made[i] = await _one(function, row, seconds)

    async def all_of_them() -> None:
        await asyncio.gather(*(some_of_them() for _ in range(at_once)))

    run_apart(all_of_them())
    return [made[i] for i in range(len(made))]


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where this thread's own event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, work).result()


def one_line(error: BaseException) -> str:
    """Return an error as the text that is kept of it, in one line of at most 500 characters.

    >>> one_line(ValueError("no\\nnumber"))
    'ValueError: no number'
    """
    words = " ".join(proper(str(error)).split())
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


async def _one(
    function: Callable[[Row], T | Awaitable[T]], row: Row, seconds: float
) -> tuple[T | None, str | None]:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            made = function(row)
            return (await made if isawaitable(made) else made), None
    except (Exception, asyncio.CancelledError) as error:  # the boundary of user code
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        late = f"TimeoutError: it took longer than {seconds:g} s"
        return None, late if limit.expired() else one_line(error)
