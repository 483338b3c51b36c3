"""Opening a store: what is there is looked at before anything is made, and made by one process."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import lance

from . import branches, marker
from .errors import NotAStoreError, RlakeError, StoreError, reason
from .leases import LOCKS
from .locks import locked
from .migrations import migrate
from .schema import SCHEMA_VERSION, TABLES
from .schema_versions import schema_of
from .store import Store

_BOUNDS = {"connect_timeout": "5s", "timeout": "15s", "client_retry_timeout": "10"}
"""So that an address that does not answer is given up in minutes, not in a quarter of an hour."""


def connect(
    uri: str | Path, *, create: bool = True, storage_options: Mapping[str, str] | None = None
) -> Store:
    """Open the store at a folder or `s3://` address, making it when it is not there.

    For `s3://`, `storage_options` are `aws_access_key_id`, `aws_secret_access_key`, `region`,
    `endpoint`, `allow_http` and what else object_store knows; where they are not given, and for
    the command line, the environment counts: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    `AWS_REGION`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP`.

    Writers exclude each other: by file locks in a folder, on NFS too where it has them, else by
    leases in the store. A folder without file locks opens as `file:///folder`, with leases; all
    its writers must then name it so.

    `PLACE@NAME` opens a branch of it, unless a folder is called so.

    >>> store = connect(tmp / "lake")
    >>> store.append("tasks", [Task.ask("2+2=", "4")]).rows
    1

    Raises NotAStoreError for a place that holds something else, or a store of a newer schema, or
    nothing at all when `create` is false; NotFoundError for a branch that is not there.
    """
    root, branch = _address(uri)
    if branch is not None:
        return branches.opened(connect(root, create=False, storage_options=storage_options), branch)
    _check_place(root, create=create)
    store = _store(root, storage_options)
    try:
        present = _present(store)
        if not present and not create:
            raise NotAStoreError(
                f"there is no store at `{uri}`; `rlake import` or `rlake run` makes one"
            )
        if not _is_whole(store, present):
            _make_whole(store, create=create)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, RlakeError):
            raise
        raise StoreError(f"cannot open the store at `{uri}`: {reason(error)}") from error
    return store


def look(uri: str | Path, *, storage_options: Mapping[str, str] | None = None) -> Store:
    """Open a store that may have lost tables, to be diagnosed; what is lost is not made anew.

    Raises NotAStoreError for a place that holds something else.
    """
    try:
        return connect(uri, create=False, storage_options=storage_options)
    except NotAStoreError:
        raise
    except StoreError:
        root, branch = _address(uri)
        return _store(root, storage_options).on_branch(branch)


def _address(uri: str | Path) -> tuple[str, str | None]:
    """Return the address of a store, and the branch that is named with it."""
    address = str(uri)
    if "://" not in address:
        try:
            address = str(Path(address).expanduser().absolute())
        except RuntimeError as error:  # there is no such user
            raise NotAStoreError(f"there is no store at `{uri}`: {reason(error)}") from error
    root, branch = branches.split(address)
    if branch is not None and ("://" in address or not Path(address).exists()):
        return root, branch
    return address, None


def _store(address: str, storage_options: Mapping[str, str] | None) -> Store:
    options = {**(_BOUNDS if address.startswith("s3") else {}), **(storage_options or {})}
    return Store(address, storage_options=options)


def _check_place(address: str, *, create: bool) -> None:
    """Raise NotAStoreError for a folder that holds something else, or nothing."""
    if "://" in address.removeprefix("file://"):
        return
    place = Path(address.removeprefix("file://"))
    if place.exists() and not place.is_dir():
        raise NotAStoreError(f"`{place}` is a file, expected the folder of a store")
    entries = {p.name for p in place.iterdir()} - {LOCKS} if place.is_dir() else set()
    if entries and not any(f"{name}.lance" in entries for name in TABLES):
        raise NotAStoreError(
            f"`{place}` is not a store: it holds {len(entries)} other entries such as "
            f"`{min(entries)}`; name an empty folder, or one that rlake made"
        )
    if not entries and not create:
        raise NotAStoreError(
            f"there is no store at `{place}`; name another with `--store`, or make one with "
            "`rlake quickstart` or `rlake import`"
        )


def _present(store: Store) -> set[str]:
    """Return the names of our tables that are there."""
    if store.folder is not None:
        return {place.stem for place in store.folder.glob("*.lance")} & set(TABLES)
    import lancedb  # takes most of a second, and only an address needs it

    db = lancedb.connect(store.uri, storage_options=store.storage_options)
    return set(db.list_tables(limit=1000).tables) & set(TABLES)


def _is_whole(store: Store, present: set[str]) -> bool:
    """Tell whether all tables are there and up to date; raise NotAStoreError for one not ours.

    A table that another process makes right now may be listed, and not open yet. Of a whole store
    only `job_events` is opened: it is made, and brought up to date, last.
    """
    is_whole = len(present) == len(TABLES)
    try:
        versions = [schema_of(store.open_at(n)) for n in (["job_events"] if is_whole else present)]
    except NotAStoreError:
        raise
    except StoreError:
        return False
    return is_whole and versions == [SCHEMA_VERSION]


def _make_whole(store: Store, *, create: bool) -> None:
    """Make a new store, go on with one whose maker was killed, or bring an older one up to date.

    Raises StoreError for one that lacks tables which it had.
    """
    with locked(store, "store"):
        present = _present(store)
        if create and not present:
            marker.put(store)
        # all schemas are looked at before anything is added to what may be someone else's
        there = {n: schema_of(store.open_at(n)) for n in present if _opens(store, n)}
        is_half_made = marker.is_there(store)
        _check_lost(store, there, is_half_made=is_half_made, create=create)
        for name in sorted(TABLES, key="job_events".__eq__):
            if name in there:
                migrate(store, name)
            else:
                _create(store, name)
        if is_half_made:
            marker.remove(store)


def _check_lost(
    store: Store, there: Mapping[str, int], *, is_half_made: bool, create: bool
) -> None:
    """Raise StoreError when tables are missing that nobody is about to make.

    `job_events` is brought up to date last: its schema says which tables the store has had.
    """
    if is_half_made and not create:
        raise StoreError(
            f"the store at `{store.uri}` was never made whole: its maker was killed; "
            "`rlake import` or `rlake run` completes it"
        )
    schema = there.get("job_events") or max(there.values(), default=1)
    lost = [n for n, table in TABLES.items() if n not in there and table.since <= schema]
    if lost and not is_half_made:
        names = ", ".join(f"`{name}`" for name in lost)
        raise StoreError(
            f"the store at `{store.uri}` has lost {'table' if len(lost) == 1 else 'tables'} "
            f"{names}: what it had is not there; put it back from a copy, or let the copy that is "
            "under way end (nothing was changed)"
        )


def _opens(store: Store, name: str) -> bool:
    """Tell whether a table that is listed was made: a killed process may have left a part of it.

    Raises StoreError for one that was made, and does not open.
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
    """Make an empty table; one that another process made meanwhile is left as it is."""
    try:
        lance.LanceDataset.commit(
            f"{store.uri}/{name}.lance",
            lance.LanceOperation.Overwrite(TABLES[name].schema, []),
            storage_options=store.storage_options,
            max_retries=0,  # a second try would overwrite the table of another process
            enable_stable_row_ids=True,
        )
    except (OSError, RuntimeError, ValueError):
        with suppress(StoreError):
            store.open_at(name)
            return
        raise
