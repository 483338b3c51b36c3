"""Tables of the user: lancedb tables named `user_*` in the store's folder, readable in SQL.

rlake never writes, merges or cleans them up; a snapshot tags their current version.
"""

from pathlib import Path

import lance

from .errors import reading

PREFIX = "user_"


def names(folder: Path | None) -> list[str]:
    """Return the names of the user's tables in a store's folder; elsewhere there are none."""
    # an object store would be listed with each query
    found = [] if folder is None else folder.glob(f"{PREFIX}*.lance")
    return sorted(place.stem for place in found)


def open_at(root: str, name: str, version: int | None = None) -> lance.LanceDataset:
    """Open a table of the user's, at its newest version or an older one."""
    with reading(f"table `{name}`"):
        return lance.dataset(f"{root}/{name}.lance", version=version)


def versions(folder: Path | None) -> dict[str, int]:
    """Return the newest version of each of the user's tables."""
    return {name: open_at(str(folder), name).version for name in names(folder)}
