"""Opening a store: what is there is looked at before anything is made, and made by one process."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import lance
import lancedb

from .errors import NotAStoreError, RlakeError, StoreError, reason
from .locks import LOCKS, locked
from .schema import TABLES
from .store import POLL_SECONDS, Store

_MAKING_SECONDS = 5.0


def connect(
    uri: str | Path, *, create: bool = True, storage_options: Mapping[str, str] | None = None
) -> Store:
    """Open the store at a folder or `s3://` address, making it when it is not there.

    >>> store = connect(tmp / "lake")
    >>> store.append("tasks", [Task.ask("2+2=", "4")]).rows
    1

    Raises NotAStoreError for a place that holds something else, or a store of a newer schema, or
    nothing at all when `create` is false.
    """
    address = str(uri)
    if "://" not in address:
        address = str(Path(address).expanduser().absolute())
        _check_place(Path(address), create=create)
    store = Store(address, storage_options=storage_options)
    try:
        db = lancedb.connect(address, storage_options=dict(storage_options or {}) or None)
        present = _present(db)
        if not present and not create:
            raise NotAStoreError(
                f"there is no store at `{uri}`; `rlake import` or `rlake run` makes one"
            )
        if not _is_whole(store, present):
            _make(store, db, storage_options)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, RlakeError):
            raise
        raise StoreError(f"cannot open the store at `{uri}`: {reason(error)}") from error
    return store


def _check_place(place: Path, *, create: bool) -> None:
    if place.is_file():
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


def _present(db: lancedb.DBConnection) -> set[str]:
    return set(db.list_tables(limit=1000).tables) & set(TABLES)


def _is_whole(store: Store, present: set[str]) -> bool:
    """Tell whether all tables are there; raise NotAStoreError when one of them is not ours.

    A table that another process makes right now may be listed, and not open yet. Of a whole store
    only `runs` is opened: it is made last.
    """
    is_whole = len(present) == len(TABLES)
    try:
        for name in ["runs"] if is_whole else present:
            store.check_schema(name)
    except NotAStoreError:
        raise
    except StoreError:
        return False
    return is_whole


def _make(store: Store, db: lancedb.DBConnection, options: Mapping[str, str] | None) -> None:
    """Make the tables that are missing. Remote stores have no lock: there, look again."""
    deadline = monotonic() + (0.0 if store.folder else _MAKING_SECONDS)
    while True:
        try:
            return _make_missing(store, db, options)
        except StoreError as error:  # a table is listed that does not open yet
            if isinstance(error, NotAStoreError) or monotonic() >= deadline:
                raise
            sleep(POLL_SECONDS)


def _make_missing(
    store: Store, db: lancedb.DBConnection, options: Mapping[str, str] | None
) -> None:
    with locked(store.folder, "store"):
        present = _present(db)
        for name in present:  # before anything is added to what may be someone else's
            store.check_schema(name)
        for name in sorted(set(TABLES) - present, key="runs".__eq__):
            _create(store, name, options)


def _create(store: Store, name: str, options: Mapping[str, str] | None) -> None:
    """Make an empty table; one that another process made meanwhile is left as it is."""
    try:
        lance.LanceDataset.commit(
            f"{store.uri}/{name}.lance",
            lance.LanceOperation.Overwrite(TABLES[name].schema, []),
            storage_options=dict(options or {}) or None,
            max_retries=0,  # a second try would overwrite the table of another process
            enable_stable_row_ids=True,
        )
    except (OSError, RuntimeError, ValueError):
        with suppress(StoreError):
            store.open_at(name)
            return
        raise
