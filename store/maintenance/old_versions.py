"""Remove old versions, and files that killed writers left."""

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import time

import lance

from ..tables import Tables

ORPHAN_SECONDS = 24 * 3600.0
"""Age of an unreferenced file before it is removed: longer than any writer takes to commit."""
_MANY_VERSIONS = 200
# Lance names the manifest of a version by 2**64 - 1 less its number.
_LAST_NAME = (1 << 64) - 1
_HOLDING_DATA = ("data", "_deletions", "_indices")


_SKEW_SECONDS = 900.0
"""How far clocks may differ where object stores serve requests: S3 refuses more."""


def ago(store: Tables, seconds: float) -> float:
    """Return the moment `seconds` ago by the clock that dates the store's files; 0 is now.

    To a machine whose own clock is ahead, what is young would look old. A folder is asked by a new
    file, which the machine that has the disk dates; elsewhere clocks may differ by 15 minutes.
    """
    if store.folder is None:
        return time() - (seconds and seconds + _SKEW_SECONDS)
    dated = time()
    # a folder that cannot be written: nothing is removed from it either
    with suppress(OSError), tempfile.TemporaryFile(dir=store.folder) as file:
        dated = os.fstat(file.fileno()).st_mtime
    # files are dated to some milliseconds only
    return (dated if abs(time() - dated) > 1 else time()) - seconds


def removable(store: Tables, name: str, *, grace: float) -> list[int]:
    """Return the versions of a table that can be removed, oldest first.

    The first version is kept, tagged ones (snapshots and branches have tags), and all that were the
    newest at some moment of the last `grace` seconds, which readers may hold.
    """
    dataset = store.dataset(name)
    kept = versions(dataset)
    since = ago(store, grace)
    old = bisect_right(kept, since, key=lambda v: _made_at(store, name, v))
    tagged = {tag["version"] for tag in dataset.tags.list().values()}
    # not the first, as which older snapshots read a table that they do not name; nor the last of
    # the old ones, which was still the newest when the grace period began
    return [v for v in kept[1 : max(1, old - 1)] if v not in tagged]


def is_due(store: Tables, name: str, *, grace: float) -> bool:
    """Return whether enough versions are removable to be worth a clean-up."""
    dataset = store.dataset(name)
    if dataset.version <= _MANY_VERSIONS:
        return False
    tagged = {tag["version"] for tag in dataset.tags.list().values()}
    free = [v for v in versions(dataset) if v not in tagged]
    if len(free) <= _MANY_VERSIONS:
        return False
    return _made_at(store, name, free[_MANY_VERSIONS]) < ago(store, grace)


def versions(dataset: lance.LanceDataset) -> list[int]:
    """Return the versions that a table has, oldest first."""
    if "://" in dataset.uri:
        return sorted(ref["version"] for ref in dataset.version_refs())
    # listing the files takes a tenth of the time; names count down, so newer ones sort first
    names = (entry.name.partition(".") for entry in os.scandir(f"{dataset.uri}/_versions"))
    numbers = (
        int(number) for number, _, kind in names if kind == "manifest" and number.isdecimal()
    )
    return sorted(_LAST_NAME - n if n > _LAST_NAME // 2 else n for n in numbers)


def remove(dataset: lance.LanceDataset, versions: Sequence[int]) -> int:
    """Remove versions and the files that only they refer to; return the bytes freed."""
    if not versions:
        return 0
    done = dataset.cleanup_old_versions(versions=list(versions), error_if_tagged_old_versions=False)
    return done.bytes_removed


def would_free(dataset: lance.LanceDataset, versions: Sequence[int]) -> int:
    """Return the bytes that `remove` would free."""
    if not versions:
        return 0
    message = dataset.explain_cleanup_old_versions(
        versions=list(versions), error_if_tagged_old_versions=False
    )
    return message.stats.bytes_removed


def orphans(
    store: Tables, dataset: lance.LanceDataset, *, older_than: float = ORPHAN_SECONDS
) -> list[Path]:
    """Return the unreferenced files of a local table that are old enough to remove.

    Elsewhere, Lance itself removes those that are a week old.
    """
    folder = Path(dataset.uri)
    if "://" in dataset.uri or not folder.is_dir():
        return []
    before = ago(store, older_than)
    # list files before reading versions: a file that is committed in between is not an orphan
    old = [path for path in _files(folder) if _changed_at(path) < before]
    if not old:
        return []
    tracked = set(dataset.tracked_files().read_all().column("path").to_pylist())
    return [path for path in old if path.relative_to(folder).as_posix() not in tracked]


def _files(folder: Path) -> Iterator[Path]:
    """Yield the data, deletion and index files of a local table, without those of its branches."""
    for part in _HOLDING_DATA:
        yield from (path for path in (folder / part).rglob("*") if path.is_file())


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # a writer removed its own file meanwhile
        return time()


def _made_at(store: Tables, name: str, version: int) -> float:
    dataset = store.open_at(name, version)
    made = dataset.get_version()["timestamp"]
    assert isinstance(made, datetime), "a version tells when it was made"
    # by its writer's clock, which may be behind; its file is dated by the one that `ago` asks
    for number in (_LAST_NAME - version, version):
        with suppress(OSError):
            path = Path(dataset.uri, "_versions", f"{number}.manifest")
            return max(made.timestamp(), path.stat().st_mtime)
    return made.timestamp()
