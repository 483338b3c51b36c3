"""Leases: locks for stores without file locks, such as `s3://`, kept in the store itself.

A lease is a small Lance table without rows, whose newest version says who holds it; each change is
a commit that succeeds only for the version that was looked at. A holder renews it while it works.
One that stays as it is for LEASE_SECONDS, by the waiter's own clock, is taken over: its holder was
killed, or sleeps. In case it sleeps, the new holder fences the table before it looks: it commits
a change that changes nothing, over which Lance refuses every append that was begun before. And a
holder makes sure that it still is one after it has looked: from then on, a fence would stop it.
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

from .errors import BusyError, ConflictError, SchemaError, StoreError, write_error
from .schema import TABLES
from .tables import Tables

LOCKS = ".locks"
"""Folder of a store that holds its locks."""
LOCK_SECONDS = 60.0
"""How long a writer waits for others before it gives up."""
LEASE_SECONDS = 10.0
"""How long a lease stays with a holder that does not renew it."""
_POLL_SECONDS = 0.05
_FENCE_TRIES = 50
_KEPT_VERSIONS = 500
_KEPT_MINUTES = 10  # longer than any look at a lease
_FAILURES = (OSError, RuntimeError, ValueError)  # Lance's, for whatever the store answers


@contextmanager
def leased(store: Tables, name: str) -> Iterator[Callable[[], None]]:
    """Hold the lease `name`; BusyError when it is not free in LOCK_SECONDS.

    Yields what a writer calls between its look and its commit: BusyError when the lease is lost.
    """
    lease = _Lease(store, name)
    lease.acquire()
    try:
        if lease.is_suspect and name in TABLES:
            fence(store, name)
        with lease.renewed():
            yield lease.check
    except (SchemaError, ConflictError):
        lease.release(suspect=False)
        raise
    except BaseException:
        lease.release(suspect=True)  # what failed here may still arrive at the store
        raise
    lease.release(suspect=False)


def fence(store: Tables, name: str) -> None:
    """Make sure that no append that was begun before this call can be committed after it."""
    for _ in range(_FENCE_TRIES):
        dataset = store.open_at(name)
        fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        try:
            lance.LanceDataset.commit(
                dataset,
                # said to change what appends must hold, so that it and appends exclude each other
                lance.LanceOperation.Merge(fragments, dataset.lance_schema),
                read_version=dataset.version,
            )
        except _FAILURES as error:
            if store.open_at(name).version == dataset.version:  # nobody was faster
                raise write_error(name, error) from error
        else:
            return
    raise BusyError(f"cannot write to `{name}`: others were faster {_FENCE_TRIES} times; try again")


@dataclass(frozen=True)
class _State:
    """What a version of the lease says: who holds it, and whether the last work ended well."""

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
        """Whether the holder before may have left something that is still under way."""

    def acquire(self) -> None:
        deadline = monotonic() + LOCK_SECONDS
        seen, since = self._look(), monotonic()
        while True:
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
        """Raise BusyError when another took the lease over."""
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
        """Give the lease back; one that cannot be given back runs out by itself."""
        with self._changing, suppress(StoreError):
            self._change(self._version, "", suspect=suspect)

    def _renew(self, done: threading.Event) -> None:
        while not done.wait(LEASE_SECONDS / 3):
            with self._changing, suppress(StoreError):
                if not done.is_set() and not self._change(self._version, self._me):
                    return  # it was taken over: the fence refuses what we are about to commit

    def _look(self) -> _State:
        try:
            dataset = lance.dataset(self._uri, storage_options=self._store.storage_options)
        except _FAILURES as error:
            if "was not found" in str(error):
                return _State(0)
            raise write_error(self._name, error) from error
        meta = dataset.schema.metadata or {}
        if dataset.version % _KEPT_VERSIONS == 0:
            with suppress(*_FAILURES):
                dataset.cleanup_old_versions(older_than=timedelta(minutes=_KEPT_MINUTES))
        owner = meta.get(b"owner", b"").decode()
        change = meta.get(b"change", b"").decode()
        return _State(dataset.version, owner, meta.get(b"suspect") == b"true", change)

    def _change(self, seen: int, owner: str, *, suspect: bool = False) -> bool:
        """Commit a version right after the one that was seen; tell whether it is ours."""
        meta = {"owner": owner, "suspect": str(suspect).lower(), "change": uuid4().hex}
        schema = pa.schema([pa.field("nothing", pa.int8())], metadata=meta)
        try:
            made = lance.LanceDataset.commit(
                self._uri,
                lance.LanceOperation.Overwrite(schema, []),
                read_version=seen,
                max_retries=0,  # a second try would overwrite what another process made of it
                storage_options=self._store.storage_options,
            )
        except _FAILURES as error:
            now = self._look()
            if now.version == seen:
                raise write_error(self._name, error) from error
            if now.change != meta["change"]:  # else it was done, and only the answer was lost
                return False
        else:
            assert made.version == seen + 1, "a commit without retries follows what was seen"
        self._version = seen + 1
        return True
