"""The boundary to user code: turn exits, cancellations and invalid rows into ordinary errors."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

from ...operators.user_errors import one_line
from ...store.errors import JobError
from ...store.records import Experience

T = TypeVar("T")

_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "rewards": (Mapping, "a mapping"),
    "metrics": (Mapping, "a mapping"),
    "metadata": ((Mapping, type(None)), "a mapping or None"),
    "drop_reason": ((str, type(None)), "a text or None"),
    "group_id": ((str, type(None)), "a text or None"),
    "rollout_index": (int, "a number"),
}
"""Types of the fields that are used before the row is checked against the table."""


async def guard(call: Callable[[], Awaitable[T]]) -> T:
    """Await the result of a function.

    Raises JobError if it exits or cancels itself. A cancellation from outside is passed on.
    """
    with guarded():
        return await call()


@contextmanager
def guarded() -> Iterator[None]:
    """Run code of a user; raise JobError if it exits or cancels itself."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        # `cancelling` counts requests to cancel this task; without one, the user's code raised it.
        if task is not None and task.cancelling():
            raise
        raise JobError("something that it waits for was cancelled") from error
    except SystemExit as error:
        code = "" if error.code is None else error.code
        raise JobError(f"it called `exit({code})`") from error


async def call_in_thread(
    call: Callable[[], Any], name: str, *, ended: Callable[[], None] = lambda: None
) -> Any:
    """Call a blocking function in its own daemon thread; an awaitable result is awaited here.

    A function that hangs occupies no thread of the event loop's executor, and the process can
    still exit. `ended` is called when the function returns.
    """
    done: Future[Any] = Future()
    context = copy_context()  # a new thread starts with an empty context

    def work() -> None:
        result, failure = None, None
        try:
            result = context.run(call)
        except BaseException as error:  # noqa: BLE001 - the awaiting caller gets it
            # What ends a thread or a generator must not end the loop that awaits it.
            fine = isinstance(error, Exception) and not isinstance(error, StopIteration)
            failure = error if fine else JobError(one_line(error))
        ended()  # before the caller wakes up and perhaps calls again
        if done.set_running_or_notify_cancel():
            done.set_exception(failure) if failure else done.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    result = await asyncio.wrap_future(done)
    return await result if inspect.isawaitable(result) else result


def check_rows(rows: Sequence[Experience]) -> list[Experience]:
    """Return rows whose fields have the right types; raise JobError for others."""
    for row in rows:
        for name, (kind, expected) in _KINDS.items():
            if not isinstance(value := getattr(row, name), kind):
                raise JobError(f"its row's `{name}` is {value!r:.100}, expected {expected}")
    return list(rows)
