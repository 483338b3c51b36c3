"""Open a store, creating it if necessary: one process at a time, after checking what exists."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import lance

from . import branches, marker
from .errors import FAILURES, NotAStoreError, StoreError, as_store_error, reason
from .leases import LOCKS
from .locks import locked
from .migrations import migrate
from .schema import SCHEMA_VERSION, TABLES
from .schema_versions import schema_of
from .store import Store
from .tables import IN_ORDER, LAST

_BOUNDS = {"connect_timeout": "5s", "timeout": "15s", "client_retry_timeout": "10"}
"""Time limits, so that an address that does not answer fails in minutes."""


def connect(
    uri: str | Path, *, create: bool = True, storage_options: Mapping[str, str] | None = None
) -> Store:
    """Open the store at a folder or `s3://` address, creating it if it does not exist.

    For `s3://`, `storage_options` are `aws_access_key_id`, `aws_secret_access_key`, `region`,
    `endpoint`, `allow_http` and what else object_store knows; where they are not given, and for
    the command line, the environment counts: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    `AWS_REGION`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`.

    Writers exclude each other: by file locks in a folder, on NFS too where it has them, else by
    leases in the store. A folder without file locks opens as `file:///folder`, with leases; all
    its writers must then name it so.

    `PLACE@NAME` opens a branch of it, unless a folder has that name.

    >>> store = connect(tmp / "lake")
    >>> store.append("tasks", [Task.ask("2+2=", "4")]).rows
    1

    Raises NotAStoreError for a folder that holds something else, a store of a newer schema, or a
    missing store when `create` is false; NotFoundError for a branch that does not exist.
    """
    root, branch = _address(uri)
    if branch is not None:
        return branches.opened(connect(root, create=False, storage_options=storage_options), branch)
    _check_place(root, create=create)
    store = _store(root, storage_options)
    with as_store_error(f"cannot open the store at `{uri}`"):
        present = _present(store)
        if not present and not create:
            raise NotAStoreError(f"no store at `{uri}`; `rlake import` or `rlake run` makes one")
        if not _is_whole(store, present):
            _make_whole(store, create=create)
    return store


def look(uri: str | Path, *, storage_options: Mapping[str, str] | None = None) -> Store:
    """Open a store for diagnosis; lost tables are not created again.

    Raises NotAStoreError for a folder that holds something else.
    """
    try:
        return connect(uri, create=False, storage_options=storage_options)
    except NotAStoreError:
        raise
    except StoreError:
        root, branch = _address(uri)
        # unchecked: the doctor diagnoses stores that lack tables
        return _store(root, storage_options).on_branch(branch)


def _address(uri: str | Path) -> tuple[str, str | None]:
    """Return the address of a store, and the branch in it."""
    address = str(uri)
    if "://" not in address:
        try:
            address = str(Path(address).expanduser().absolute())
        except RuntimeError as error:  # `~name` of an unknown user
            raise NotAStoreError(f"no store at `{uri}`: {reason(error)}") from error
    root, branch = branches.split(address)
    if branch is not None and ("://" in address or not Path(address).exists()):
        return root, branch
    return address, None


def _store(address: str, storage_options: Mapping[str, str] | None) -> Store:
    options = {**(_BOUNDS if address.startswith("s3") else {}), **(storage_options or {})}
    return Store(address, storage_options=options)


def _check_place(address: str, *, create: bool) -> None:
    """Raise NotAStoreError for a folder that holds something else, or that is missing."""
    if "://" in address.removeprefix("file://"):
        return
    place = Path(address.removeprefix("file://"))
    if place.exists() and not place.is_dir():
        raise NotAStoreError(f"`{place}` is a file, expected the folder of a store")
    # an opening that was killed leaves its locks: that folder still counts as empty
    entries = {p.name for p in place.iterdir()} - {LOCKS} if place.is_dir() else set()
    if entries and not any(f"{name}.lance" in entries for name in TABLES):
        raise NotAStoreError(
            f"`{place}` is not a store: it holds {len(entries)} other entries such as "
            f"`{min(entries)}`; name an empty folder, or one that rlake made"
        )
    if not entries and not create:
        raise NotAStoreError(
            f"no store at `{place}`; name another with `--store`, or make one with "
            "`rlake quickstart` or `rlake import`"
        )


def _present(store: Store) -> set[str]:
    """Return the names of our tables that exist."""
    if store.folder is not None:
        return {place.stem for place in store.folder.glob("*.lance")} & set(TABLES)
    import lancedb  # takes most of a second, and only an address needs it

    db = lancedb.connect(store.uri, storage_options=store.storage_options)
    return set(db.list_tables(limit=1000).tables) & set(TABLES)


def _is_whole(store: Store, present: set[str]) -> bool:
    """Return whether all tables exist and are up to date; raise NotAStoreError for foreign ones.

    A table that another process is creating may be listed before it can be opened. Of a complete
    store only two tables are opened: `job_events`, which is created and migrated last, and
    `experiences`, whose columns had other names in development builds.
    """
    is_whole = len(present) == len(TABLES)
    try:
        versions = [
            schema_of(store.open_at(n)) for n in ((LAST, "experiences") if is_whole else present)
        ]
    except NotAStoreError:
        raise
    except StoreError:
        return False
    return is_whole and set(versions) == {SCHEMA_VERSION}


def _make_whole(store: Store, *, create: bool) -> None:
    """Create a store, complete one whose creation was killed, or migrate an older one.

    Raises StoreError for a store that has lost tables.
    """
    with locked(store, "store"):
        present = _present(store)
        if create and not present:
            marker.put(store)
        # read all schemas before adding anything: the folder may be someone else's
        there = {n: schema_of(store.open_at(n)) for n in present if _opens(store, n)}
        # within the lock no other process creates it: a marker means that one was killed
        is_half_made = marker.is_there(store)
        _check_lost(store, there, is_half_made=is_half_made, create=create)
        for name in IN_ORDER:
            if name in there:
                migrate(store, name)
            else:
                _create(store, name)
        if is_half_made:
            marker.remove(store)


def _check_lost(
    store: Store, there: Mapping[str, int], *, is_half_made: bool, create: bool
) -> None:
    """Raise StoreError when tables were lost.

    `job_events` is migrated last, so its schema says which tables the store has had.
    """
    if is_half_made and not create:
        raise StoreError(
            f"the store at `{store.uri}` was never made whole: its maker was killed; "
            "`rlake import` or `rlake run` completes it"
        )
    schema = there.get(LAST) or max(there.values(), default=1)
    lost = [n for n, table in TABLES.items() if n not in there and table.since <= schema]
    if lost and not is_half_made:
        names = ", ".join(f"`{name}`" for name in lost)
        raise StoreError(
            f"the store at `{store.uri}` has lost {'table' if len(lost) == 1 else 'tables'} "
            f"{names}: what it had is not there; put it back from a copy, or let the copy that is "
            "under way end (nothing was changed)"
        )


def _opens(store: Store, name: str) -> bool:
    """Return whether a listed table is complete: a killed process may have left a part of it.

    Raises StoreError for a complete table that does not open.
    """
    try:
        store.open_at(name)
    except StoreError as error:
        has_rows = store.folder is not None and any((store.folder / f"{name}.lance").glob("data/*"))
        if has_rows or "was not found" not in str(error):
            raise
        return False
    return True


def _create(store: Store, name: str) -> None:
    """Create an empty table, unless another process has created it meanwhile."""
    try:
        lance.LanceDataset.commit(
            f"{store.uri}/{name}.lance",
            lance.LanceOperation.Overwrite(TABLES[name].schema, []),
            storage_options=store.storage_options,
            max_retries=0,  # a second try would overwrite the table of another process
            # indexes and change feeds keep row ids, which a compaction must not change
            enable_stable_row_ids=True,
        )
    except FAILURES:
        with suppress(StoreError):
            store.open_at(name)
            return
        raise
