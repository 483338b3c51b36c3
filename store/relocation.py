"""Relocate branches of a store that was moved or copied.

Lance records the absolute paths of the files that a branch shares. After a move, each branch is
corrected when it is opened. Only its newest version is: its own snapshots stay unreadable.
"""

import copy
import dataclasses
import json
import logging
from pathlib import Path

import lance

from .locks import locked
from .tables import IN_ORDER, LAST, Tables

_PLACE = "rlake.place"

_log = logging.getLogger(__name__)


def is_elsewhere(store: Tables) -> bool:
    """Return whether a branch was last relocated to another address."""
    place = store.open_at(LAST).config().get(_PLACE)
    return place is None or not _is_same(place, store.root)


def relocate(store: Tables) -> None:
    """Point all tables of a branch to the shared files at this address.

    Their indexes are dropped; `maintain` creates them again. Repeat this if it was killed.
    """
    for table in IN_ORDER:
        with locked(store, table):
            if _relocate(store.open_at(table), f"{store.root}/{table}.lance"):
                _log.warning("table `%s` of `%s` was moved here", table, store.uri)
    # last: after a kill, the old address makes the next opening relocate again
    settle(store)


def settle(store: Tables) -> None:
    """Record the current address of a branch."""
    store.open_at(LAST).update_config({_PLACE: store.root})


def _relocate(dataset: lance.LanceDataset, root: str) -> bool:
    """Point a table to the current paths of shared files; return whether there were any."""
    marker = f"/{root.rpartition('/')[2]}"
    wrong = {
        number: root + base.path.rpartition(marker)[2]
        for number, base in dataset.base_paths().items()
        if not _is_same(base.path, root + base.path.rpartition(marker)[2])
    }
    fragments = [fragment.metadata for fragment in dataset.get_fragments()]
    if not any(file.base_id in wrong for fragment in fragments for file in fragment.files):
        return False
    # indexes refer to base paths too: dropping them is simpler than rewriting them
    for index in dataset.describe_indices():
        dataset.drop_index(index.name)
    known = {base.path for base in dataset.base_paths().values()}
    dataset.add_bases(
        [
            lance.DatasetBasePath(path, name=f"place-{len(known) + i}", is_dataset_root=True)
            for i, path in enumerate(sorted(set(wrong.values()) - known))
        ]
    )
    numbers = {base.path: number for number, base in dataset.base_paths().items()}
    moved = {number: numbers[path] for number, path in wrong.items()}
    lance.LanceDataset.commit(
        dataset,
        lance.LanceOperation.Merge([_moved(f, moved) for f in fragments], dataset.lance_schema),
        read_version=dataset.version,
    )
    return True


def _moved(
    fragment: lance.fragment.FragmentMetadata, moved: dict[int, int]
) -> lance.fragment.FragmentMetadata:
    """Return a fragment whose files refer to other base paths."""
    files = [copy.copy(file) for file in fragment.files]
    for file in files:
        if file.base_id is not None:
            file.base_id = moved.get(file.base_id, file.base_id)
    gone = fragment.deletion_file
    if gone is not None and gone.base_id in moved:
        message = json.loads(gone.json()) | {"base_id": moved[gone.base_id]}
        gone = type(gone).from_json(json.dumps(message))  # pyright: ignore[reportAttributeAccessIssue]
    return dataclasses.replace(fragment, files=files, deletion_file=gone)


def _is_same(one: str, other: str) -> bool:
    """Return whether two addresses are the same place, by whichever path."""
    one, other = one.removeprefix("file://"), other.removeprefix("file://")
    if "://" in one or "://" in other:
        return one == other
    return Path(one).resolve() == Path(other).resolve()
