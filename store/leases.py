"""Leases: locks for stores without file locks, such as `s3://`, kept in the store itself.

A lease is a small Lance table without rows, whose newest version names its holder; each change is a
commit that succeeds only on top of the version that was read. A holder renews its lease while it
works. A lease that is unchanged for LEASE_SECONDS, by the waiter's own clock, is taken over: its
holder was killed, or is suspended. In case it is suspended, the new holder fences the table before
reading it, by an empty commit that makes Lance refuse every append begun before. A holder checks
that it still holds the lease after reading the table: from then on, a fence would stop its append.
"""

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from uuid import uuid4

import lance
import pyarrow as pa

from .errors import FAILURES, BusyError, ConflictError, SchemaError, StoreError, write_error
from .schema import TABLES
from .tables import Tables

LOCKS = ".locks"
"""Folder of a store for its locks."""
LOCK_SECONDS = 60.0
"""How long a writer waits for others before it gives up."""
LEASE_SECONDS = 10.0
"""How long a lease stays with a holder that does not renew it."""
_POLL_SECONDS = 0.05
_FENCE_TRIES = 50
_KEPT_VERSIONS = 500
_KEPT_MINUTES = 10  # longer than any look at a lease


@contextmanager
def leased(store: Tables, name: str) -> Iterator[Callable[[], None]]:
    """Hold the lease `name`; raise BusyError when it is not free within LOCK_SECONDS.

    Yields a function to call between reading and committing; it raises BusyError when the lease is
    lost.
    """
    lease = _Lease(store, name)
    lease.acquire()
    try:
        # before the new holder reads: an append of the old one could land after that
        if lease.is_suspect and name in TABLES:
            fence(store, name)
        with lease.renewed():
            yield lease.check
    except (SchemaError, ConflictError):
        lease.release(suspect=False)
        raise
    except BaseException:
        lease.release(suspect=True)  # a write that failed here may still arrive at the store
        raise
    lease.release(suspect=False)


def fence(store: Tables, name: str) -> None:
    """Prevent appends that began before this call from being committed after it."""
    for _ in range(_FENCE_TRIES):
        dataset = store.open_at(name)
        fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        try:
            lance.LanceDataset.commit(
                dataset,
                # declared to change the schema, so that Lance refuses concurrent appends
                lance.LanceOperation.Merge(fragments, dataset.lance_schema),
                read_version=dataset.version,
            )
        except FAILURES as error:
            if store.open_at(name).version == dataset.version:  # nobody was faster
                raise write_error(name, error) from error
        else:
            return
    raise BusyError(f"cannot write to `{name}`: others were faster {_FENCE_TRIES} times; try again")


@dataclass(frozen=True)
class _State:
    """A version of a lease: its holder, and whether the last holder may have left a write."""

    version: int
    owner: str = ""
    is_suspect: bool = False
    change: str = ""


class _Lease:
    def __init__(self, store: Tables, name: str) -> None:
        self._store, self._name = store, name
        self._uri = f"{store.root}/{LOCKS}/{store.lock_name(name)}.lance"
        self._me = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex}"
        self._version = 0
        self._changing = threading.Lock()
        self.is_suspect = False
        """Whether the previous holder may have left a write in flight."""

    def acquire(self) -> None:
        deadline = monotonic() + LOCK_SECONDS
        seen, since = self._look(), monotonic()
        while True:
            # by our own clock, since we saw this version: clocks of machines differ
            expired = monotonic() - since >= LEASE_SECONDS
            if (not seen.owner or expired) and self._change(seen.version, self._me):
                self.is_suspect = bool(seen.owner) or seen.is_suspect
                return
            if monotonic() >= deadline:
                raise BusyError(
                    f"gave up after {LOCK_SECONDS:g} s: `{seen.owner}` is writing `{self._name}` "
                    f"of `{self._store.uri}`"
                )
            sleep(_POLL_SECONDS * random.uniform(0.5, 1.5))
            now = self._look()
            if now.version != seen.version:
                seen, since = now, monotonic()

    def check(self) -> None:
        """Raise BusyError when another process has taken the lease over."""
        with self._changing:
            if self._look().version != self._version:
                raise BusyError(
                    f"cannot write to `{self._name}`: the lease ran out and was taken over; try "
                    "it again, what is stored already is left out"
                )

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease from a thread until the work is done, or the lease is lost."""
        done = threading.Event()
        threading.Thread(target=self._renew, args=(done,), daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def release(self, *, suspect: bool) -> None:
        """Release the lease; if that fails, it expires by itself."""
        with self._changing, suppress(StoreError):
            self._change(self._version, "", suspect=suspect)

    def _renew(self, done: threading.Event) -> None:
        # three renewals per lease: one may fail without losing it
        while not done.wait(LEASE_SECONDS / 3):
            with self._changing, suppress(StoreError):
                if not done.is_set() and not self._change(self._version, self._me):
                    return  # taken over: the fence refuses our commit

    def _look(self) -> _State:
        try:
            dataset = lance.dataset(self._uri, storage_options=self._store.storage_options)
        except FAILURES as error:
            if "was not found" in str(error):
                return _State(0)
            raise write_error(self._name, error) from error
        meta = dataset.schema.metadata or {}
        # every takeover, renewal and release is a version, and many versions slow each read
        if dataset.version % _KEPT_VERSIONS == 0:
            with suppress(*FAILURES):
                dataset.cleanup_old_versions(older_than=timedelta(minutes=_KEPT_MINUTES))
        owner = meta.get(b"owner", b"").decode()
        change = meta.get(b"change", b"").decode()
        return _State(dataset.version, owner, meta.get(b"suspect") == b"true", change)

    def _change(self, seen: int, owner: str, *, suspect: bool = False) -> bool:
        """Commit the version after the one seen; return whether it is ours."""
        meta = {"owner": owner, "suspect": str(suspect).lower(), "change": uuid4().hex}
        schema = pa.schema([pa.field("nothing", pa.int8())], metadata=meta)
        try:
            made = lance.LanceDataset.commit(
                self._uri,
                lance.LanceOperation.Overwrite(schema, []),
                read_version=seen,
                max_retries=0,  # a retry would overwrite the change of another process
                storage_options=self._store.storage_options,
            )
        except FAILURES as error:
            now = self._look()
            if now.version == seen:
                raise write_error(self._name, error) from error
            if now.change != meta["change"]:  # else it succeeded, and only the reply was lost
                return False
        else:
            assert made.version == seen + 1, "a commit without retries follows what was seen"
        self._version = seen + 1
        return True
