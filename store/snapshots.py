"""Snapshots: names for the whole store at one moment."""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from .errors import NotFoundError, QueryError, nearest

if TYPE_CHECKING:
    from .store import Store


@dataclass(frozen=True)
class Snapshot:
    """A name, and the version of each table that it stands for."""

    name: str
    versions: dict[str, int]
    note: str | None
    created_at: datetime


def current(store: "Store") -> dict[str, Snapshot]:
    """Return the snapshots that there are, by name, oldest first."""
    newest = {}
    for row in store.scan("snapshots").collect().sort("created_at", maintain_order=True).to_dicts():
        newest.pop(row["name"], None)
        if not row.get("is_dropped"):
            versions = {p["name"]: p["version"] for p in row["tables"]}
            newest[row["name"]] = Snapshot(row["name"], versions, row["note"], row["created_at"])
    return newest


def find(store: "Store", name: str) -> Snapshot:
    """Return a snapshot; raises NotFoundError, with the nearest name, when there is none."""
    named = current(store)
    if name not in named:
        raise NotFoundError(f"there is no snapshot `{name}`{nearest(name, named)}")
    return named[name]


def create(store: "Store", name: str, *, note: str | None = None) -> None:
    """Name the store as it is now, once; tags keep its versions from clean-up."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise QueryError(
            f"a snapshot cannot be called {name!r}: use letters, digits, `.`, `-` and `_`"
        )
    if name in current(store):
        raise QueryError(f"snapshot `{name}` exists already; choose another name")
    versions = store.versions()
    for table_name, version in versions.items():
        tags = store.dataset(table_name).tags
        if f"snapshot-{name}" in tags.list():  # by one that was killed before it was done
            tags.delete(f"snapshot-{name}")
        tags.create(f"snapshot-{name}", version)
    tables = [{"name": n, "version": v} for n, v in versions.items()]
    store.append("snapshots", [{"name": name, "tables": tables, "note": note}])
