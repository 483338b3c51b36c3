"""Old versions that nobody needs are removed, and files that killed writers left behind."""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

import lance

if TYPE_CHECKING:
    from ..store import Store

ORPHAN_SECONDS = 24 * 3600.0
"""How old a file must be that no version knows: longer than any writer takes to its commit."""
_MANY_VERSIONS = 200
_HOLDING_DATA = ("data", "_deletions", "_indices")


def removable(store: "Store", name: str, *, grace: float) -> list[int]:
    """Return the versions of a table that can go, oldest first.

    Kept are the first one, each that a tag names (snapshots and branches have tags), and all that
    were the newest one at some moment of the last `grace` seconds: readers may hold those.
    """
    dataset = store.open_at(name)
    versions = sorted(ref["version"] for ref in dataset.version_refs())
    since = datetime.now() - timedelta(seconds=grace)  # Lance tells local times
    old = bisect_right(versions, since, key=lambda v: _made_at(store, name, v))
    tagged = {tag["version"] for tag in dataset.tags.list().values()}
    return [v for v in versions[1 : max(1, old - 1)] if v not in tagged]


def is_due(store: "Store", name: str, *, grace: float) -> bool:
    """Tell whether there are so many removable versions that looking for the newest one is slow."""
    if store.dataset(name).version < _MANY_VERSIONS:
        return False
    return len(removable(store, name, grace=grace)) >= _MANY_VERSIONS


def remove(dataset: lance.LanceDataset, versions: Sequence[int]) -> int:
    """Remove versions, with the files that only they refer to; return the bytes that are free."""
    if not versions:
        return 0
    done = dataset.cleanup_old_versions(versions=list(versions), error_if_tagged_old_versions=False)
    return done.bytes_removed


def would_free(dataset: lance.LanceDataset, versions: Sequence[int]) -> int:
    """Return the bytes that `remove` would free."""
    if not versions:
        return 0
    told = dataset.explain_cleanup_old_versions(
        versions=list(versions), error_if_tagged_old_versions=False
    )
    return told.stats.bytes_removed


def orphans(dataset: lance.LanceDataset, *, older_than: float = ORPHAN_SECONDS) -> list[Path]:
    """Return the files of a local table that no version refers to, and that are old enough.

    Elsewhere there are none: Lance itself removes those that are a week old.
    """
    folder = Path(dataset.uri)
    if "://" in dataset.uri or not folder.is_dir():
        return []
    before = time() - older_than
    # listed before the versions are read: what is committed in between is no orphan
    old = [p for p in files(folder) if p.stat().st_mtime < before]
    if not old:
        return []
    known = dataset.tracked_files().read_all().select(["base_uri", "path"]).to_pylist()
    tracked = {f"{file['base_uri']}/{file['path']}" for file in known}
    return [path for path in old if str(path) not in tracked]


def files(folder: Path) -> list[Path]:
    """Return the data, deletion and index files of a local table, without those of its branches."""
    return [p for part in _HOLDING_DATA for p in (folder / part).rglob("*") if p.is_file()]


def _made_at(store: "Store", name: str, version: int) -> datetime:
    made = store.open_at(name, version).get_version()["timestamp"]
    assert isinstance(made, datetime), "a version tells when it was made"
    return made
