"""The marker of a store that is being created: without it, a missing table was lost.

It is stored with the locks, written before the first table is created and removed after the last. A
partial copy of a complete store has no marker.
"""

from pathlib import Path
from tempfile import NamedTemporaryFile

from lance.file import LanceFileSession

from .leases import LOCKS
from .tables import Tables

_NAME = "store.making"


def put(store: Tables) -> None:
    """Mark the store as being created."""
    if store.folder is not None:
        _path(store.folder).touch()
        return
    with NamedTemporaryFile() as file:
        _session(store).upload_file(file.name, _NAME)


def is_there(store: Tables) -> bool:
    """Return whether the store is being created; for the holder of its lock: was interrupted."""
    if store.folder is not None:
        return _path(store.folder).exists()
    return _session(store).contains(_NAME)


def remove(store: Tables) -> None:
    """Mark the store as complete."""
    if store.folder is not None:
        _path(store.folder).unlink()
        return
    _session(store).delete_file(_NAME)


def _path(folder: Path) -> Path:
    return folder / LOCKS / _NAME


def _session(store: Tables) -> LanceFileSession:
    return LanceFileSession(f"{store.root}/{LOCKS}", storage_options=store.storage_options)
