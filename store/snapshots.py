"""Snapshots: named states of the whole store, to read, to compare and to restore."""

import re
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

import lance

from . import branches, migrations, user_tables
from .append import WritableTables
from .errors import NotFoundError, QueryError, as_store_error, nearest
from .locks import locked
from .schema import REFERRING_FIRST, TABLES
from .tables import LAST, Tables, check_present, newest_named, own_place, tag_prefix, unfinished

_NAME = r"(?=.{1,150}$)[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*"
NOW = "now"
"""Name of the current state of the store, where a snapshot's name is expected."""
_RESTORED = tuple(name for name in REFERRING_FIRST if name != "snapshots")
"""The order of a restore; `snapshots` itself is kept, so that a restore can be undone."""


@dataclass(frozen=True)
class Snapshot:
    """A name for one version of each table."""

    name: str
    versions: dict[str, int]
    note: str | None
    created_at: datetime


@dataclass(frozen=True)
class Restored:
    """The result of a restore."""

    snapshot: str
    undo: str
    """The snapshot of the state before; restoring it undoes the restore."""
    tables: dict[str, int]
    """Tables that had changed since, with their new versions."""


def current(store: Tables) -> dict[str, Snapshot]:
    """Return all snapshots by name, oldest first."""
    found = {}
    for name, row in newest_named(store, "snapshots").items():
        # a table that was added to the schema later was empty then, as in its first version
        versions = dict.fromkeys(TABLES, 1) | {p["name"]: p["version"] for p in row["tables"]}
        found[name] = Snapshot(name, versions, row["note"], row["created_at"])
    return found


def find(store: Tables, name: str) -> Snapshot:
    """Return a snapshot; raises NotFoundError, with the nearest name, when there is none."""
    named = current(store)
    if name in named:
        return named[name]
    where = f" on branch `{store.branch_name}`" if store.branch_name else ""
    if where and name in current(store.on_branch(None)):
        raise NotFoundError(
            f"no snapshot `{name}`{where}: it was taken of `{store.root}` after the branch had left"
        )
    raise NotFoundError(f"no snapshot `{name}`{where}{nearest(name, named)}")


def create(store: WritableTables, name: str, *, note: str | None = None) -> None:
    """Name the current state of the store; tags protect its versions from clean-up."""
    _check_name(name)
    check_present(store, "use")
    with locked(store, "names"):
        _create(store, name, note)


def drop(store: WritableTables, name: str, *, force: bool = False) -> None:
    """Remove a name; the versions that it protected may be cleaned up from then on.

    Raises QueryError, without `force`, when an unfinished run works on it or a branch shares it.
    """
    check_present(store, "use")
    with locked(store, "names"):
        if name not in current(store):
            _untag(store, name)  # a drop that was killed may have left tags
        snapshot = find(store, name)
        if not force:
            _check_unused(store, snapshot)
        tables = [{"name": n, "version": v} for n, v in snapshot.versions.items()]
        # the row before the tags: a drop that is killed leaves at most tags behind
        store.append(
            "snapshots",
            [{"name": name, "tables": tables, "note": snapshot.note, "is_dropped": True}],
        )
        _untag(store, name)


def restore(store: WritableTables, name: str, *, force: bool = False) -> Restored:
    """Restore all tables to a snapshot by adding versions; history is kept.

    The state before is saved as a snapshot first, so that the restore can be undone. Writers wait
    until it ends; readers may meanwhile see some tables restored and others not. Repeat a restore
    that was killed to complete it. Raises QueryError while a job is running, unless `force` says
    that those jobs were killed.
    """
    check_present(store, "use")
    with ExitStack() as held:
        # in the order in which appends to several tables take theirs, or both could deadlock
        for lock in ("names", *sorted(_RESTORED)):
            held.enter_context(locked(store, lock))
        snapshot = find(store, name)
        _check_own(store, snapshot)
        if not force:
            _check_idle(store)
        # within the locks: a row appended after the undo snapshot could not be brought back
        undo = _undo(store, snapshot)
        tables = {
            table: _restore(store, table, snapshot.versions[table])
            for table in _RESTORED
            if not _is_same(store, table, snapshot.versions[table])
        }
    # an older version may lack columns; the last table last, as it says that all are migrated
    for table in sorted(tables, key=LAST.__eq__):
        migrations.migrate(store, table)
    return Restored(name, undo, tables)


def _create(store: WritableTables, name: str, note: str | None) -> None:
    if name in current(store):
        raise QueryError(f"snapshot `{name}` exists already; choose another name")
    versions = store.versions()
    of_user = store.user_versions()
    tables = _untag(store, name)  # a creation that was killed may have left tags
    # the tags before the row: the versions of a listed name are always protected from clean-up
    with as_store_error(f"cannot take the snapshot `{name}`", fix="do it again"):
        for table, version in versions.items():
            tables[table].tags.create(_tag(store, name), (store.branch_name, version))
        for table, version in of_user.items():
            tables[table].tags.create(_tag(store, name), version)
    pinned = [{"name": n, "version": v} for n, v in (versions | of_user).items()]
    store.append("snapshots", [{"name": name, "tables": pinned, "note": note}])


def _check_name(name: str) -> None:
    if not re.fullmatch(_NAME, name) or name.endswith(".lock") or name == NOW:
        raise QueryError(
            f"a snapshot cannot be called {name!r}: use letters, digits, `-`, `_` and single `.`, "
            f"and not `{NOW}`"
        )


def _check_unused(store: Tables, snapshot: Snapshot) -> None:
    pinned, _, what = snapshot.name.rpartition(".")
    for run, job in unfinished(store) if what in ("rows", "tasks") else ():
        if run == pinned:
            raise QueryError(
                f"snapshot `{snapshot.name}` is what run `{run}` works on, and its `{job}` is not "
                "done; end the run first, or drop the snapshot with `force`"
            )
    for branch in branches.current(store).values():
        there = current(store.on_branch(branch.name)).get(snapshot.name)
        if branch.parent == store.branch_name and there == snapshot:
            raise QueryError(
                f"snapshot `{snapshot.name}` is also one of branch `{branch.name}`, which shares "
                "this past; drop it there first, or drop it with `force`"
            )


def _check_own(store: Tables, snapshot: Snapshot) -> None:
    for table in _RESTORED:
        if any(snapshot.versions[table] < newest for _, newest in store.lines(table)[:1]):
            raise QueryError(
                f"snapshot `{snapshot.name}` is older than branch `{store.branch_name}`, which "
                "cannot go back further than it began; make a branch at the snapshot instead"
            )


def _check_idle(store: Tables) -> None:
    for run, job in unfinished(store, running=True):
        raise QueryError(
            f"`{job}` of run `{run}` is running, and would lose its rows; stop it, or use `force` "
            "if it was killed"
        )


def _undo(store: WritableTables, snapshot: Snapshot) -> str:
    """Return the snapshot that undoes a restore, taking one if necessary.

    It is that of the same restore if that was killed, or one that equals the current state.
    """
    named, prefix = current(store), f"before-restore-{snapshot.name}"
    # a restore that was killed has taken one: a second would be of a half-restored store
    for name, taken in reversed(named.items()):
        if name.rpartition("-")[0] == prefix and all(
            version == taken.versions[table] or _is_same(store, table, snapshot.versions[table])
            for table, version in store.versions().items()
            if table != "snapshots"
        ):
            return name
    # the state has a name already, and tags keep versions from being cleaned up
    for name, taken in reversed(named.items()):
        if all(_is_same(store, table, taken.versions[table]) for table in _RESTORED):
            return name
    number = 1
    while f"{prefix}-{number}" in named:
        number += 1
    _create(store, f"{prefix}-{number}", f"taken before `{snapshot.name}` was restored")
    return f"{prefix}-{number}"


def _is_same(store: Tables, table: str, version: int) -> bool:
    """Return whether a table has the rows of a version; fragment ids are never reused."""
    now, then = (
        [(f.fragment_id, f.num_deletions) for f in dataset.get_fragments()]
        for dataset in (store.open_at(table), store.open_at(table, version))
    )
    return now == then


def _restore(store: Tables, table: str, version: int) -> int:
    with as_store_error(f"cannot restore `{table}`", fix="do it again"):
        # a branch's own version, not the equal one of its parent
        lance.dataset(
            own_place(store, table), version=version, storage_options=store.storage_options
        ).restore()
    dataset = store.open_at(table)
    store.committed(table, dataset)
    return dataset.version


def _tag(store: Tables, name: str) -> str:
    return f"{tag_prefix(store.branch_name)}snapshot-{name}"


def _untag(store: Tables, name: str) -> dict[str, lance.LanceDataset]:
    """Remove the tags of a snapshot, and return all tables, opened for tags."""
    tag = _tag(store, name)
    with as_store_error(f"cannot give up the tags of snapshot `{name}`", fix="do it again"):
        tables = {table: store.open_for_names(table) for table in TABLES}
        for table in user_tables.names(store.folder):
            tables[table] = user_tables.open_at(store.root, table)
        for dataset in tables.values():
            if tag in dataset.tags.list():
                dataset.tags.delete(tag)
    return tables
