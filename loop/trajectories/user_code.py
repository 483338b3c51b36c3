"""Where users' code ends: what it raises, or returns, that would end a job becomes its error."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from ...store.errors import JobError
from ...store.records import Experience

T = TypeVar("T")

_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "rewards": (Mapping, "a mapping"),
    "metrics": (Mapping, "a mapping"),
    "metadata": ((Mapping, type(None)), "a mapping or None"),
    "drop_reason": ((str, type(None)), "a text or None"),
    "group_id": ((str, type(None)), "a text or None"),
    "rollout": (int, "a number"),
}
"""What must be right of a row before the table looks at it."""


async def guard(call: Callable[[], Awaitable[T]]) -> T:
    """Await what a function gives; that it exits, or cancels itself, is an error like others.

    Raises JobError then. When somebody else cancels it, it is cancelled.
    """
    try:
        return await call()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise JobError("something that it waits for was cancelled") from error
    except SystemExit as error:
        code = "" if error.code is None else error.code
        raise JobError(f"it called `exit({code})`") from error


def check_rows(rows: Sequence[Experience]) -> list[Experience]:
    """Return rows that rewards and names can be added to; JobError for others."""
    for row in rows:
        for name, (kind, expected) in _KINDS.items():
            if not isinstance(value := getattr(row, name), kind):
                raise JobError(f"its row's `{name}` is {value!r:.100}, expected {expected}")
    return list(rows)
