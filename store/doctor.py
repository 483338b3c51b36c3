"""Diagnose a store: find what is wrong or soon will be, and how to fix it."""

import multiprocessing
import platform
import shutil
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version as installed
from typing import Literal

import lance

from . import branches, snapshots, user_tables
from .errors import FAILURES, RlakeError, StoreError, counted, reason
from .maintenance import compaction, indexes, old_versions
from .records import now
from .schema import SCHEMA_VERSION, TABLES
from .schema_versions import describe_foreign, foreign, schema_of
from .store import Store
from .tables import unfinished

Level = Literal["ok", "note", "warning", "error"]
IsLive = Callable[[Store, str, str], bool | None]
"""Tells whether a process is this job of a run; None when that cannot be known."""

_PARTS = ("pylance", "lancedb", "duckdb", "polars", "pyarrow")
_MANY_FILES = 200
_MANY_VERSIONS = 2000
_LITTLE_ROOM, _NO_ROOM = 5 << 30, 100 << 20
_CLOCKS_APART = timedelta(minutes=1)
_MAINTAIN = "run `rlake maintain`"


@dataclass(frozen=True)
class Finding:
    """The result of one check, and how to fix it if it is not ok."""

    level: Level
    what: str
    way_out: str = ""


def diagnose(store: Store, *, is_live: IsLive | None = None) -> list[Finding]:
    """Check everything that is known to go wrong; nothing is changed.

    Each table's files are opened but not read completely: `corruption.examine` does that, and
    `rlake verify` for the rows of a training step.
    """
    found = [_parts(), *_start_method(), *_room(store)]
    broken: set[str] = set()
    for name in TABLES:
        findings = list(_table(store, name))
        broken |= {name for finding in findings if finding.level == "error"}
        found += findings
    for name in user_tables.names(store.folder):
        try:
            rows = user_tables.open_at(store.root, name).count_rows()
            found.append(Finding("ok", f"`{name}` is a table of your own: {counted(rows, 'row')}"))
        except StoreError as error:
            broken.add(name)
            found.append(Finding("error", str(error), "restore it, or move it out of the store"))
    if not broken:  # SQL opens all tables
        found += _runs(store, is_live)
        found += _shortened(store)
    if "snapshots" not in broken:
        found += _snapshots(store, TABLES.keys() - broken)
    return [*found, *_branches(store)]


def _parts() -> Finding:
    parts = ", ".join(f"{part} {installed(part)}" for part in _PARTS)
    return Finding("ok", f"rlake {installed('rlake')}, Python {platform.python_version()}, {parts}")


def _start_method() -> Iterator[Finding]:
    chosen = multiprocessing.get_start_method(allow_none=True)
    if (chosen or multiprocessing.get_all_start_methods()[0]) == "fork":
        yield Finding(
            "warning" if chosen else "note",
            "Python starts processes by fork here, and one that is forked while tables are open "
            "may hang",
            "call `multiprocessing.set_start_method('spawn')` in programs that start processes",
        )


def _room(store: Store) -> Iterator[Finding]:
    if store.folder is None:
        return
    free = shutil.disk_usage(store.folder).free
    level: Level = "ok" if free >= _LITTLE_ROOM else "warning" if free >= _NO_ROOM else "error"
    way_out = "" if level == "ok" else f"free some; {_MAINTAIN}, which removes old versions"
    yield Finding(level, f"{free / 1e9:.1f} GB are free where the store lies", way_out)


def _table(store: Store, name: str) -> Iterator[Finding]:
    try:
        dataset = store.open_at(name)
        schema = schema_of(dataset)
        rows = dataset.count_rows()
    except RlakeError as error:
        yield Finding("error", str(error), lost(store))
        return
    if schema < SCHEMA_VERSION:
        yield Finding("note", f"`{name}` has schema {schema}", "open the store to bring it on")
    faults = list(_files(store, name, dataset))
    yield from faults
    # What is missing would be named again by every check that reads the files.
    if faults:
        return
    yield from _foreign(name, dataset)
    yield from _future(name, dataset)
    yield from _untidy(store, name, dataset)
    versions = len(old_versions.versions(dataset))
    if rows or versions > 1:
        files = len(dataset.get_fragments())
        counts = counted(rows, "row"), counted(files, "file"), counted(versions, "version")
        yield Finding("ok", "`{}`: {} in {}, {}".format(name, *counts))


def _files(store: Store, name: str, dataset: lance.LanceDataset) -> Iterator[Finding]:
    """Open each file of the newest version."""
    for fragment in dataset.get_fragments():
        try:
            # reads the end of each file, and so finds those cut short; flipped bits take `--deep`
            fragment.open_session()
            # with a filter, or Lance would take the count from the manifest
            if fragment.num_deletions:
                fragment.count_rows("true")
        except FAILURES as error:
            paths = ", ".join(f"`{file.path}`" for file in fragment.data_files())
            yield Finding(
                "error",
                f"`{name}`: {counted(fragment.physical_rows, 'row')} in {paths} cannot be read: "
                f"{reason(error)}",
                lost(store),
            )


def lost(store: Store) -> str:
    """Return how to recover from lost or damaged files."""
    return (
        f"put the file back from a copy of `{store.root}`; without one, go back to a snapshot of "
        "before with `rlake snapshot restore NAME`"
    )


def _foreign(name: str, dataset: lance.LanceDataset) -> Iterator[Finding]:
    for field in foreign(TABLES[name], dataset):
        what, way_out = describe_foreign(TABLES[name], field)
        yield Finding("note" if field.nullable else "error", f"`{name}`: {what}", way_out)


def _future(name: str, dataset: lance.LanceDataset) -> Iterator[Finding]:
    limit = (now() + _CLOCKS_APART).isoformat(" ", "microseconds").removesuffix("+00:00")
    rows = dataset.count_rows(filter=f"created_at > timestamp '{limit}'")
    if rows:
        yield Finding(
            "warning",
            f"`{name}`: {counted(rows, 'row')} from the future: a clock was, or is, wrong",
            "set the clock right; rows that come after them are stamped later than they are",
        )


def _untidy(store: Store, name: str, dataset: lance.LanceDataset) -> Iterator[Finding]:
    small = compaction.small_files(dataset, thorough=True)
    if len(small) >= _MANY_FILES:
        yield Finding("warning", f"`{name}`: {len(small)} small files slow every query", _MAINTAIN)
    versions = len(old_versions.versions(dataset))
    if versions >= _MANY_VERSIONS:
        yield Finding("warning", f"`{name}`: {versions} versions slow every commit", _MAINTAIN)
    if indexes.is_due(name, dataset):
        rows = indexes.new_rows(name, dataset)
        yield Finding("note", f"`{name}`: {counted(rows, 'row')} not in its indexes yet", _MAINTAIN)
    lost = old_versions.orphans(store, dataset)
    if lost:
        size = sum(path.stat().st_size for path in lost)
        yield Finding(
            "note",
            f"`{name}`: {counted(len(lost), 'file')} of {size / 1e6:.1f} MB that no version knows, "
            f"such as `{lost[0].name}`: their writer was killed",
            _MAINTAIN,
        )


def _runs(store: Store, is_live: IsLive | None) -> Iterator[Finding]:
    for run, job in unfinished(store, running=True):
        lives = is_live(store, run, job) if is_live else None
        # None means that the run's machine is another one, and so nothing can be
        # said of its process.
        if lives is False:
            yield Finding(
                "warning",
                f"`{job}` of run `{run}` is on record as running, and no process is it: it was "
                "killed",
                "go on with `--resume`, or leave it",
            )
        else:
            known = "is running" if lives else "is on record as running, in a place not seen here"
            yield Finding("ok" if lives else "note", f"`{job}` of run `{run}` {known}")


def _shortened(store: Store) -> Iterator[Finding]:
    """Find tables whose newest version is older than one that was trained on.

    A table that has lost its newest manifest opens at the version before, without any error.
    """
    known = store.sql(
        "SELECT seen.name, max(seen.version) FROM "
        "(SELECT unnest(drawn_from) AS seen FROM (SELECT DISTINCT drawn_from FROM draws)) "
        "GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    for name, version in known:
        newest = store.open_at(name).version
        if newest < version:
            yield Finding(
                "error",
                f"`{name}` stands at version {newest}, and rows were drawn from version {version}: "
                "its newest versions are gone",
                lost(store),
            )


def _snapshots(store: Store, sound: Set[str]) -> Iterator[Finding]:
    taken = snapshots.current(store)
    for snapshot in taken.values():
        for name in sorted(sound & snapshot.versions.keys()):
            version = snapshot.versions[name]
            try:
                store.open_at(name, version)
            except StoreError as error:
                yield Finding(
                    "error",
                    f"snapshot `{snapshot.name}` names version {version} of `{name}`, which is "
                    f"gone: {reason(error)}",
                    f"give it up with `rlake snapshot drop {snapshot.name}`",
                )
    if taken:
        yield Finding("ok", counted(len(taken), "snapshot"))


def _branches(store: Store) -> Iterator[Finding]:
    try:
        known = branches.current(store)
    except (RlakeError, *FAILURES) as error:
        yield Finding("error", f"the branches cannot be listed: {reason(error)}", lost(store))
        return
    for name in known:
        there = store.on_branch(name)
        for table in TABLES:
            try:
                there.open_at(table)
            except StoreError as error:
                yield Finding(
                    "error",
                    f"branch `{name}` has no `{table}`: {reason(error)}",
                    f"give it up with `rlake branch drop {name}`",
                )
    if known:
        yield Finding("ok", counted(len(known), "branch", "branches"))
