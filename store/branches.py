"""Branches: copies of the whole store that share all rows from before they were created.

A branch of the store is a branch of each Lance table, with a tag on the version that it was created
from, which protects that version from clean-up. Older versions are read from the parent.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from lance.file import LanceFileSession

from . import migrations, relocation
from .errors import NotFoundError, QueryError, StoreError, as_store_error, nearest
from .locks import locked
from .schema import SCHEMA_VERSION, TABLES
from .schema_versions import schema_of
from .tables import (
    IN_ORDER,
    LAST,
    Tables,
    known_branches,
    own_place,
    place_on,
    tag_prefix,
    unfinished,
)

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"

S = TypeVar("S", bound=Tables)


@dataclass(frozen=True)
class Branch:
    """A branch of the store."""

    name: str
    parent: str | None
    """The branch that it was created from; None for the main line."""
    created_at: datetime
    versions: dict[str, int]
    """Versions of the parent's tables that it was created from."""


def split(address: str) -> tuple[str, str | None]:
    """Return the address of a store, and the branch named after the last `@`, if any.

    >>> split("s3://bucket/lake@exp"), split("/data/lake")
    (('s3://bucket/lake', 'exp'), ('/data/lake', None))
    """
    folder, slash, last = address.rpartition("/")
    place, at, name = last.rpartition("@")
    return (f"{folder}{slash}{place}", name) if at and place else (address, None)


def current(store: Tables) -> dict[str, Branch]:
    """Return all branches by name, oldest first."""
    known = {table: known_branches(store, table) for table in TABLES}
    listed = sorted(known[LAST].items(), key=lambda item: (item[1]["create_at"], item[0]))
    return {
        name: Branch(
            name,
            info["parent_branch"],
            datetime.fromtimestamp(info["create_at"], UTC),
            {t: found[name]["parent_version"] for t, found in known.items() if name in found},
        )
        for name, info in listed
    }


def find(store: Tables, name: str) -> Branch:
    """Return a branch; raises NotFoundError, with the nearest name, when there is none."""
    known = current(store)
    if name not in known:
        raise NotFoundError(f"`{store.root}` has no branch `{name}`{nearest(name, known)}")
    return known[name]


def rows_added(store: Tables, branch: Branch) -> dict[str, int]:
    """Return how many rows each table of a branch gained since it was created."""
    there = store.on_branch(branch.name)
    return {
        table: there.count(table) - there.open_at(table, version).count_rows()
        for table, version in branch.versions.items()
    }


def create(store: S, name: str, *, versions: Callable[[], Mapping[str, int]]) -> S:
    """Create a branch from `versions` of the tables, and return it.

    Raises QueryError for a name that is taken or invalid. A branch whose creation was killed is not
    listed; creating it again completes it.
    """
    _check_name(name)
    if store.folder is not None and "?" in store.root:
        raise QueryError(
            f"`{store.root}` can have no branches: Lance takes what follows its `?` for the query "
            "of a URL; move the store to a path without one"
        )
    with _changing(store, f"cannot make the branch `{name}`"):
        if name in known_branches(store, LAST):
            raise QueryError(f"branch `{name}` exists already; choose another name")
        leaving = versions()
        for table, version in leaving.items():
            _check_own(store, table, version)
            _remove(store, table, name)
        # the last table last: until it has the branch, the branch is not listed and can be redone
        for table in sorted(leaving, key=LAST.__eq__):
            _leave(store, table, name, leaving[table])
        relocation.settle(store.on_branch(name))
    return opened(store, name)


def opened(store: S, name: str) -> S:
    """Return the store on a branch, brought up to date; raises NotFoundError when there is none."""
    if name not in known_branches(store, LAST):
        find(store, name)
    there = store.on_branch(name)
    schema = schema_of(there.open_at(LAST))
    _check_lost(there, schema)
    if schema < SCHEMA_VERSION:
        _complete(store, name)
        for table in IN_ORDER:
            migrations.migrate(there, table)
    if relocation.is_elsewhere(there):
        with _changing(store, f"cannot put the branch `{name}` right, whose store was moved"):
            relocation.relocate(there)
    return there


def _check_lost(there: Tables, schema: int) -> None:
    """Raise StoreError when a table of a local branch has lost its folder."""
    lost = [
        f"`{name}`"
        for name, table in TABLES.items()
        if table.since <= schema and there.folder and not Path(own_place(there, name)).is_dir()
    ]
    if lost:
        raise StoreError(
            f"the branch `{there.uri}` has lost {', '.join(lost)}: what it had is not there; put "
            f"it back from a copy, or give it up with `rlake branch drop {there.branch_name}`"
        )


def _complete(store: Tables, name: str) -> None:
    """Add the tables that the store gained after the branch was created, without rows."""
    branch = find(store, name)
    for table in TABLES.keys() - branch.versions.keys():
        with _changing(store, f"cannot complete the branch `{name}`"):
            if name not in known_branches(store, table):
                _leave(store.on_branch(None), table, name, 1)


def drop(store: Tables, name: str, *, force: bool = False) -> None:
    """Remove a branch with all that was written on it, its runs' checkpoints and weights included.

    Raises QueryError while other branches left from it, or, without `force`, while a run on it is
    not done.
    """
    with _changing(store, f"cannot drop the branch `{name}`"):
        known = {table: known_branches(store, table) for table in TABLES}
        if not any(name in found for found in known.values()):
            find(store, name)
        children = [n for n, info in known[LAST].items() if info["parent_branch"] == name]
        if children:
            raise QueryError(
                f"branch `{name}` has branches of its own: {', '.join(sorted(children))}; "
                "drop them first"
            )
        if name in known[LAST] and not force:
            _check_done(store.on_branch(name))
        half_made = {n for found in known.values() for n in found} - known[LAST].keys() - {name}
        # the last table first: a drop that is killed never leaves a listed branch without tables
        for table in reversed(IN_ORDER):
            for other in sorted(half_made):
                _remove(store, table, other)
            _remove(store, table, name)
        # after the tables: a branch that is still listed must have its weights
        folder = store.on_branch(name).runs_folder
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _changing(store: Tables, what: str) -> Iterator[None]:
    """Hold the lock on the set of branches."""
    with locked(store.on_branch(None), "branches"), as_store_error(what, fix="do it again"):
        yield


def _check_name(name: str) -> None:
    if not re.fullmatch(_NAME, name) or name == "main":
        raise QueryError(
            f"a branch cannot be called {name!r}: use up to 64 letters, digits, `-` and `_`, "
            "and not `main`"
        )


def _check_own(store: Tables, table: str, version: int) -> None:
    for _, newest in store.lines(table)[:1]:
        if version < newest:
            raise QueryError(
                f"that snapshot is older than branch `{store.branch_name}`; "
                f"make the branch from `{store.root}`, or from the branch that has the snapshot"
            )


def _check_done(store: Tables) -> None:
    for run, job in unfinished(store):
        raise QueryError(
            f"`{job}` of run `{run}` on branch `{store.branch_name}` is not done; "
            "end it, or drop the branch with `force`"
        )


def _leave(store: Tables, table: str, name: str, version: int) -> None:
    """Create a table's branch from a version, and tag that version."""
    dataset = store.open_for_names(table)
    # the tag first: a clean-up could remove the version before the branch protects it
    dataset.tags.create(f"{tag_prefix(name)}base", (store.branch_name, version))
    dataset.create_branch(name, (store.branch_name, version))


def _remove(store: Tables, table: str, name: str) -> None:
    """Remove a table's branch, complete or not, and its tags."""
    dataset = store.on_branch(None).open_for_names(table)
    tags = [tag for tag in dataset.tags.list() if tag.startswith(tag_prefix(name))]
    base = f"{tag_prefix(name)}base"
    for tag in sorted(tags, key=base.__eq__):  # Lance keeps a branch while there are tags on it
        if tag == base and name in dataset.branches.list():
            dataset.branches.delete(name)
        dataset.tags.delete(tag)
    session = LanceFileSession(place_on(store, table, name), storage_options=store.storage_options)
    for file in session.list():  # of one that was killed before Lance knew of the branch
        session.delete_file(file)
