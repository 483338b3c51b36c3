"""Tables of the user's own: lancedb tables called `user_*` in the store's folder, read in SQL.

rlake never writes, merges or cleans them up; a snapshot tags the version that it stands for.
"""

from typing import TYPE_CHECKING

import lance

from .errors import reading

if TYPE_CHECKING:
    from .store import Store

PREFIX = "user_"


def names(store: "Store") -> list[str]:
    """Return the names of the user's tables in the store's folder; elsewhere there are none."""
    found = [] if store.folder is None else store.folder.glob(f"{PREFIX}*.lance")
    return sorted(place.stem for place in found)


def open_at(store: "Store", name: str, version: int | None = None) -> lance.LanceDataset:
    """Open a table of the user's, at its newest version or an older one."""
    with reading(f"table `{name}`"):
        return lance.dataset(f"{store.root}/{name}.lance", version=version)


def versions(store: "Store") -> dict[str, int]:
    """Return the newest version of each of the user's tables."""
    return {name: open_at(store, name).version for name in names(store)}
