"""Snapshots: names for the whole store at one moment, to look at, to compare, and to go back to."""

import re
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

import lance

from . import branches, migrations, user_tables
from .append import WritableTables
from .errors import NotFoundError, QueryError, StoreError, as_store_error, nearest
from .job_status import unfinished
from .locks import locked
from .schema import REFERRING_FIRST, TABLES
from .tables import Tables, own_place, tag_prefix

_NAME = r"(?=.{1,150}$)[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*"
NOW = "now"
"""Stands for the store as it is, where a snapshot's name is asked for."""
_RESTORED = tuple(name for name in REFERRING_FIRST if name != "snapshots")
"""Restored in this order; names are kept, so that one can go forward again."""


@dataclass(frozen=True)
class Snapshot:
    """A name, and the version of each table that it stands for."""

    name: str
    versions: dict[str, int]
    note: str | None
    created_at: datetime


@dataclass(frozen=True)
class Restored:
    """What a restore did."""

    snapshot: str
    undo: str
    """The snapshot of how the store was before: to restore it undoes this."""
    tables: dict[str, int]
    """Tables that had changed since, with their new versions."""


def current(store: Tables) -> dict[str, Snapshot]:
    """Return the snapshots that there are, by name, oldest first."""
    newest = {}
    for row in store.scan("snapshots").collect().sort("created_at", maintain_order=True).to_dicts():
        newest.pop(row["name"], None)
        if not row["is_dropped"]:
            # a table that came later was empty then, as in its first version
            versions = dict.fromkeys(TABLES, 1) | {p["name"]: p["version"] for p in row["tables"]}
            newest[row["name"]] = Snapshot(row["name"], versions, row["note"], row["created_at"])
    return newest


def find(store: Tables, name: str) -> Snapshot:
    """Return a snapshot; raises NotFoundError, with the nearest name, when there is none."""
    named = current(store)
    if name in named:
        return named[name]
    where = f" on branch `{store.branch_name}`" if store.branch_name else ""
    if where and name in current(store.on_branch(None)):
        raise NotFoundError(
            f"there is no snapshot `{name}`{where}: it was taken of `{store.root}` after the "
            "branch had left"
        )
    raise NotFoundError(f"there is no snapshot `{name}`{where}{nearest(name, named)}")


def create(store: WritableTables, name: str, *, note: str | None = None) -> None:
    """Name the store as it is now, once; tags keep its versions from clean-up."""
    _check_name(name)
    _check_present(store)
    with locked(store, "names"):
        _create(store, name, note)


def drop(store: WritableTables, name: str, *, force: bool = False) -> None:
    """Give a name up; the versions that it kept may be cleaned up from then on.

    Raises QueryError when a run that is not done works on it or, without `force`, a branch has it.
    """
    _check_present(store)
    with locked(store, "names"):
        if name not in current(store):
            _untag(store, name)  # by a drop that was killed before it was done
        snapshot = find(store, name)
        if not force:
            _check_unused(store, snapshot)
        tables = [{"name": n, "version": v} for n, v in snapshot.versions.items()]
        # the row before the tags, for the same reason: a drop that is killed leaves tags at most
        store.append(
            "snapshots",
            [{"name": name, "tables": tables, "note": snapshot.note, "is_dropped": True}],
        )
        _untag(store, name)


def restore(store: WritableTables, name: str, *, force: bool = False) -> Restored:
    """Make all tables as they were at a snapshot, as new versions of them; history stays.

    A snapshot of how they were before is taken first, so that it can be undone. Writers wait
    meanwhile; one that reads meanwhile may see some tables as they were, and some as they become.
    A restore that was killed is completed by doing it again. Raises QueryError while a job is
    running, unless `force` says that those jobs were killed.
    """
    _check_present(store)
    with ExitStack() as held:
        # in one order everywhere, as appends to several tables take theirs: else two would wait
        # for each other
        for lock in ("names", *sorted(_RESTORED)):
            held.enter_context(locked(store, lock))
        snapshot = find(store, name)
        _check_own(store, snapshot)
        if not force:
            _check_idle(store)
        undo = _undo(store, snapshot)
        tables = {
            table: _restore(store, table, snapshot.versions[table])
            for table in _RESTORED
            if not _is_same(store, table, snapshot.versions[table])
        }
    for table in sorted(
        tables, key="job_events".__eq__
    ):  # the last one says that all are up to date
        migrations.migrate(store, table)
    return Restored(name, undo, tables)


def _create(store: WritableTables, name: str, note: str | None) -> None:
    if name in current(store):
        raise QueryError(f"snapshot `{name}` exists already; choose another name")
    versions = store.versions()
    of_user = store.user_versions()
    _untag(store, name)  # by one that was killed before it was done
    # the tags before the row: a name that is listed has versions that no clean-up removes
    with as_store_error(f"cannot take the snapshot `{name}`"):
        for table, version in versions.items():
            store.open_for_names(table).tags.create(_tag(store, name), (store.branch_name, version))
        for table, version in of_user.items():
            user_tables.open_at(store.root, table).tags.create(_tag(store, name), version)
    tables = [{"name": n, "version": v} for n, v in (versions | of_user).items()]
    store.append("snapshots", [{"name": name, "tables": tables, "note": note}])


def _check_name(name: str) -> None:
    if not re.fullmatch(_NAME, name) or name.endswith(".lock") or name == NOW:
        raise QueryError(
            f"a snapshot cannot be called {name!r}: use letters, digits, `-`, `_` and single `.`, "
            f"and not `{NOW}`"
        )


def _check_present(store: Tables) -> None:
    if store.is_past:
        raise StoreError(f"{store!r} is read only: it shows the past; use the store itself")


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
    """Return what to go back to: that of the same restore that was killed, or a new snapshot.

    When the store is as some snapshot has it, it is that one.
    """
    named, prefix = current(store), f"before-restore-{snapshot.name}"
    for name, taken in reversed(named.items()):
        if name.rpartition("-")[0] == prefix and all(
            version == taken.versions[table] or _is_same(store, table, snapshot.versions[table])
            for table, version in store.versions().items()
            if table != "snapshots"
        ):
            return name
    for name, taken in reversed(named.items()):
        if all(_is_same(store, table, taken.versions[table]) for table in _RESTORED):
            return name
    number = 1
    while f"{prefix}-{number}" in named:
        number += 1
    _create(store, f"{prefix}-{number}", f"taken before `{snapshot.name}` was restored")
    return f"{prefix}-{number}"


def _is_same(store: Tables, table: str, version: int) -> bool:
    """Tell whether a table holds what it held at a version; ids of fragments are never reused."""
    now, then = (
        [(f.fragment_id, f.num_deletions) for f in dataset.get_fragments()]
        for dataset in (store.open_at(table), store.open_at(table, version))
    )
    return now == then


def _restore(store: Tables, table: str, version: int) -> int:
    with as_store_error(f"cannot restore `{table}`"):
        # of a branch its own version, not the equal one of the line that it left
        lance.dataset(
            own_place(store, table),
            version=version,
            storage_options=store.storage_options,
        ).restore()
    dataset = store.open_at(table)
    store.committed(table, dataset)
    return dataset.version


def _tag(store: Tables, name: str) -> str:
    return f"{tag_prefix(store.branch_name)}snapshot-{name}"


def _untag(store: Tables, name: str) -> None:
    tag = _tag(store, name)
    with as_store_error(f"cannot give up the tags of snapshot `{name}`"):
        tagged = [store.open_for_names(table) for table in TABLES]
        tagged += [
            user_tables.open_at(store.root, table) for table in user_tables.names(store.folder)
        ]
        for table in tagged:
            if tag in table.tags.list():
                table.tags.delete(tag)
