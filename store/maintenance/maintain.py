"""Maintenance of a store, while others read and write it."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter

import lance
from filelock import FileLock, Timeout

from .. import embeddings
from ..append import WritableTables
from ..errors import FAILURES, StoreError, as_store_error, reading, reason
from ..locks import LOCKS
from ..schema import TABLES
from ..tables import Tables, check_present
from . import compaction, indexes, old_versions, retention
from .report import Cared, Look, Report

GRACE_SECONDS = 600.0
"""How long a superseded version is kept, since a query may still be reading it."""


def maintain(
    store: WritableTables,
    *,
    only_due: bool = False,
    dry_run: bool = False,
    grace: float = GRACE_SECONDS,
) -> Report:
    """Do what `Store.maintain` says."""
    check_present(store, "maintain")
    began = perf_counter()
    with _alone(store) as busy:
        if busy:
            return Report((), (), perf_counter() - began, busy=busy)
        names = [n for n in TABLES if not only_due or _is_due(store, n, grace=grace)]
        before = {n: look(store, n, measured=not only_due) for n in names}
        for name in () if dry_run or only_due else TABLES:
            # before anything is written: the disk may be full
            _clean(store, name, thorough=True, grace=_kept(grace, began))
        # before files are merged: the merge then drops the deleted rows
        forgotten = () if only_due else retention.apply(store, dry_run=dry_run)
        care = _foresee if dry_run else _care
        tables = tuple(
            care(store, n, before[n], only_due=only_due, grace=_kept(grace, began)) for n in names
        )
        if not dry_run and not only_due:
            embeddings.refresh(store)
    return Report(tables, forgotten, perf_counter() - began, is_dry_run=dry_run)


def _kept(grace: float, began: float) -> float:
    """Return a grace period that counts from the start of `maintain`.

    So the time spent on other tables does not remove versions that readers hold. 0 stays 0.
    """
    return grace and grace + perf_counter() - began


def look(store: Tables, name: str, *, measured: bool = True) -> Look:
    """Return the state of a table; with `measured`, its bytes and the time of a lookup by key."""
    dataset = store.open_at(name)
    with reading(f"table `{name}`"):
        return Look(
            fragments=len(dataset.get_fragments()),
            num_bytes=_num_bytes(dataset) if measured else 0,
            versions=len(old_versions.versions(dataset)),
            new_rows=indexes.new_rows(name, dataset),
            query_ms=_query_ms(store, name) if measured and dataset.count_rows() else None,
        )


def _is_due(store: Tables, name: str, *, grace: float) -> bool:
    dataset = store.dataset(name)
    return (
        bool(compaction.small_files(dataset, thorough=False))
        or indexes.is_due(name, dataset)
        or old_versions.is_due(store, name, grace=grace)
    )


def _care(store: Tables, name: str, before: Look, *, only_due: bool, grace: float) -> Cared:
    left = None
    try:
        dataset = store.open_at(name)
        chosen = compaction.small_files(dataset, thorough=not only_due)
        if chosen:
            compaction.merge(dataset, chosen)
        dataset = store.open_at(name)
        if not only_due or indexes.is_due(name, dataset):
            indexes.refresh(name, dataset)
    except FAILURES as error:
        # a conflict comes as OSError or RuntimeError; only the text tells it from other failures
        if "conflict" not in str(error).lower():
            raise StoreError(f"cannot maintain `{name}`: {reason(error)}") from error
        left = "its files, which another process changes right now"
    if not only_due or old_versions.is_due(store, name, grace=grace):
        _clean(store, name, thorough=not only_due, grace=grace)
    return Cared(name, before, look(store, name, measured=not only_due), left)


def _clean(store: Tables, name: str, *, thorough: bool, grace: float) -> None:
    dataset = store.open_at(name)
    with as_store_error(f"cannot clean up `{name}`"):
        old_versions.remove(dataset, old_versions.removable(store, name, grace=grace))
    for orphan in old_versions.orphans(store, dataset) if thorough else ():
        orphan.unlink(missing_ok=True)


def _foresee(store: Tables, name: str, before: Look, *, only_due: bool, grace: float) -> Cared:
    """Estimate the effect of `_care`."""
    dataset = store.open_at(name)
    chosen = compaction.small_files(dataset, thorough=not only_due)
    rows = sum(dataset.get_fragment(i).count_rows() for i in chosen)  # pyright: ignore[reportOptionalMemberAccess]
    merged = -(-rows // compaction.rows_a_file(dataset))
    versions = old_versions.removable(store, name, grace=grace)
    lost = sum(path.stat().st_size for path in old_versions.orphans(store, dataset))
    freed = old_versions.would_free(dataset, versions) + lost
    after = Look(
        fragments=before.fragments - len(chosen) + merged,
        num_bytes=before.num_bytes - freed,
        versions=before.versions - len(versions),
        new_rows=0,
    )
    return Cared(name, before, after)


@contextmanager
def _alone(store: Tables) -> Iterator[str | None]:
    """Hold the maintenance lock of a local store, or yield who holds it.

    Elsewhere no lock is taken: of two processes that change the same files, Lance lets one win.
    """
    if store.folder is None:
        yield None
        return
    place = store.folder / LOCKS / f"{store.lock_name('maintain')}.lock"
    note = place.with_suffix(".json")
    # never the soft lock: its file would outlive a killed process, and end all maintenance
    lock = FileLock(place, timeout=0, fallback_to_soft=False)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        yield _who(note)
        return
    except (OSError, NotImplementedError) as error:
        raise StoreError(f"cannot maintain `{store.uri}`: {reason(error)}") from error
    try:
        me = {"pid": os.getpid(), "host": socket.gethostname()}
        with suppress(OSError):  # on a full disk, the note is optional
            note.write_text(
                json.dumps({**me, "since": datetime.now(UTC).isoformat("T", "seconds")})
            )
        yield None
    finally:
        lock.release()


def _who(note: Path) -> str:
    try:
        message = json.loads(note.read_text())
        return (
            f"process {message['pid']} on {message['host']} maintains it since {message['since']}"
        )
    except (OSError, ValueError, KeyError):  # it has only just begun
        return "another process maintains it"


def _num_bytes(dataset: lance.LanceDataset) -> int:
    """Return the bytes of a table's files, without those of its branches."""
    files = dataset.all_files().read_all().select(["path", "size_bytes"])
    sizes = zip(*(column.to_pylist() for column in files.columns), strict=True)
    return sum(size for path, size in sizes if not path.startswith("tree/"))


def _query_ms(store: Tables, name: str) -> float:
    """Return the median time of three lookups of a missing key, in milliseconds."""
    taken = []
    for _ in range(3):
        began = perf_counter()
        key = TABLES[name].key[0]
        store.open_at(name).to_table(columns=[key], filter=f"{key} = ''")
        taken.append(1000 * (perf_counter() - began))
    return median(taken)
