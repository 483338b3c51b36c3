"""One process at a time looks and commits: file locks that the system releases when it dies."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import StoreError, reason

LOCKS = ".locks"
"""Folder of a store that holds its locks."""
LOCK_SECONDS = 60.0
"""How long a writer waits for others before it gives up."""
_POLL_SECONDS = 0.01


def locked(folder: Path | None, name: str) -> AbstractContextManager[object]:
    """Hold the lock `name` of a store's folder; a store that is no folder has none.

    Raises StoreError when it is not free in LOCK_SECONDS, or cannot be made.
    """
    if folder is None:
        return nullcontext()
    place = folder / LOCKS
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place / f"{name}.lock", timeout=LOCK_SECONDS, poll_interval=_POLL_SECONDS)
        return lock.acquire()
    except Timeout as error:
        raise StoreError(
            f"gave up after {LOCK_SECONDS:g} s: another process is writing `{name}` of `{folder}`"
        ) from error
    except OSError as error:
        raise StoreError(
            f"cannot write to `{name}`: {reason(error)}; nothing was stored"
        ) from error
