"""Locks between processes: file locks, which the system releases when a process dies."""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from .errors import BusyError, StoreError, reason
from .leases import LOCK_SECONDS, LOCKS, leased
from .tables import Tables

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def locked(store: Tables, name: str) -> AbstractContextManager[Callable[[], None]]:
    """Hold the lock `name` of a store: a file lock in a folder, a lease elsewhere.

    Yields a function to call between reading and a commit that depends on it; it raises BusyError
    when the lock was lost meanwhile, as only a lease can be.

    Writers get a file lock in the order in which they asked. Raises BusyError when it is not free
    within LOCK_SECONDS, StoreError when it cannot be created.
    """
    lock_name = store.lock_name(name)
    return leased(store, name) if store.folder is None else _file_lock(store.folder, lock_name)


@contextmanager
def _file_lock(folder: Path, name: str) -> Iterator[Callable[[], None]]:
    place = folder / LOCKS
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = _FileLock(place / f"{name}.lock")
        is_ours = lock.acquire(LOCK_SECONDS)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StoreError(
                f"cannot write to `{name}`: {reason(error)}; nothing was stored"
            ) from error
        raise StoreError(
            f"the file system of `{folder}` has no file locks; open the store as "
            f"`file://{folder}` in all processes, which takes leases in their place"
        ) from error
    if not is_ours:
        raise BusyError(
            f"gave up after {LOCK_SECONDS:g} s: another process is writing `{name}` of `{folder}`"
        )
    try:
        yield lambda: None
    finally:
        lock.release()


class _FileLock:
    """A lock with the system's fair queue: a process that polls instead may starve."""

    def __init__(self, path: Path) -> None:
        # as far as the umask allows, writable for all: the users of a group share a store
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._turn = threading.Lock()
        self._granted, self._given_up = threading.Event(), False
        self._error: OSError | None = None

    def acquire(self, seconds: float) -> bool:
        """Wait for the lock; return whether it was granted. If not, the object is spent."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._wait(seconds)
        except OSError:
            os.close(self._file)
            raise
        return True

    def release(self) -> None:
        # closing is not enough: a child process may have inherited the file
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)

    def _wait(self, seconds: float) -> bool:
        """Wait in a separate thread: the system's queue has no time limit."""
        threading.Thread(target=self._queue, daemon=True).start()
        try:
            self._granted.wait(seconds)
        except BaseException:
            # an interrupt: a lock that was granted meanwhile must not stay held
            if not self._give_up():
                self.release()
            raise
        if self._error is not None:
            os.close(self._file)
            raise self._error
        return not self._give_up()

    def _give_up(self) -> bool:
        """Leave the queue; return whether the lock had not been granted yet."""
        with self._turn:
            self._given_up = not self._granted.is_set()
        return self._given_up

    def _queue(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            self._error = error
        # under `_turn`: the waiter cannot give up between the check and the grant
        with self._turn:
            if self._given_up:
                os.close(self._file)
            else:
                self._granted.set()
