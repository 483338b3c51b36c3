"""The marker of a store that is being made: without one, a table that is not there was lost.

It lies where the locks are, and is put before the first table is made and removed after the last.
A copy of a part of a whole store has none, whatever the part.
"""

from pathlib import Path
from tempfile import NamedTemporaryFile

from lance.file import LanceFileSession

from .leases import LOCKS
from .tables import Tables

_NAME = "store.making"


def put(store: Tables) -> None:
    """Say that the store is being made."""
    if store.folder is not None:
        _path(store.folder).touch()
        return
    with NamedTemporaryFile() as file:
        _session(store).upload_file(file.name, _NAME)


def is_there(store: Tables) -> bool:
    """Tell whether the store is being made; who holds its lock knows that the maker was killed."""
    if store.folder is not None:
        return _path(store.folder).exists()
    return _session(store).contains(_NAME)


def remove(store: Tables) -> None:
    """Say that the store is whole."""
    if store.folder is not None:
        _path(store.folder).unlink()
        return
    _session(store).delete_file(_NAME)


def _path(folder: Path) -> Path:
    return folder / LOCKS / _NAME


def _session(store: Tables) -> LanceFileSession:
    return LanceFileSession(f"{store.root}/{LOCKS}", storage_options=store.storage_options)
