"""Snapshots: taken while others write, compared, given up, and gone back to."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.builders import experiences, task
from support.processes import said, start, tell
from support.table_rows import draw, event

from rlake.store import Store, connect, snapshots
from rlake.store.changes import ChangeFeed
from rlake.store.errors import NotFoundError, QueryError, StoreError
from rlake.store.locks import locked
from rlake.store.replay import Sampler
from rlake.store.replay.row_index import Index
from rlake.store.schema import REFERRING_FIRST, TABLES
from rlake.store.snapshots import restore


def ids(store: Store) -> list[str]:
    return sorted(store.scan("experiences").collect()["experience_id"])


@contextmanager
def python(code: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """Run code in another process; lines written to it let it go on."""
    process = start(code, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def go_on(process: "subprocess.Popen[str]") -> str:
    tell(process)
    return said(process)


# names


def test_a_snapshot_is_named_once(store: Store) -> None:
    store.snapshot("first")
    with pytest.raises(QueryError, match="`first` exists already"):
        store.snapshot("first")


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "é", "..", ".a", "a\n", "a.", "a..b", "a.lock", "now", "a" * 151]
)
def test_a_snapshot_has_a_plain_name(store: Store, name: str) -> None:
    with pytest.raises(QueryError, match="a snapshot cannot be called"):
        store.snapshot(name)
    store.snapshot("plain-name_1.0")
    assert store.at("plain-name_1.0").count("snapshots") == 0


def test_a_snapshot_that_was_killed_half_way_can_be_taken_again(store: Store) -> None:
    store.append("tasks", [task(0)])
    store.dataset("tasks").tags.create("snapshot-again", 1)  # all that the killed one did
    store.snapshot("again")
    assert store.dataset("tasks").tags.list()["snapshot-again"]["version"] == 2


def test_the_past_takes_no_snapshots_drops_none_and_is_not_restored(store: Store) -> None:
    store.snapshot("first")
    past = store.at("first")
    for change in (past.snapshot, lambda n: snapshots.drop(past, n), lambda n: restore(past, n)):
        with pytest.raises(StoreError, match="it shows the past"):
            change("first")


# while others write


class Busy(Store):
    """A store to which another writer appends a row, and a draw of it, after each look at it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.uri)
        self.other, self.rows = store, iter(experiences(1000))

    def newest_version(self, name: str) -> int:
        found = super().newest_version(name)
        row = next(self.rows)
        self.other.append("experiences", [row])
        self.other.append("draws", [draw(str(row.experience_id), 1 + self.other.count("draws"))])
        return found


def test_a_snapshot_taken_while_others_write_has_every_row_that_its_rows_refer_to(
    store: Store,
) -> None:
    Busy(store).snapshot("one")
    dangling = (
        "SELECT count(*) FILTER (e.experience_id IS NULL), count(*) > 5 FROM draws d "
        "LEFT JOIN experiences e USING (experience_id)"
    )
    assert store.at("one").sql(dangling).fetchall() == [(0, True)]


def test_every_table_is_read_before_those_that_it_refers_to() -> None:
    assert sorted(REFERRING_FIRST) == sorted(TABLES)
    place = {name: i for i, name in enumerate(REFERRING_FIRST)}
    for name, table in TABLES.items():
        for other, key in (("experiences", "experience_id"), ("tasks", "task_id")):
            if key in table.names and name != other:
                assert place[name] < place[other], f"{name} refers to {other}"


# differences


def test_a_difference_counts_rows_by_table_run_and_source(store: Store) -> None:
    store.append("experiences", experiences(4, run_id="a"))
    store.snapshot("one")
    store.append("tasks", [task(0), task(1)])
    store.append("experiences", experiences(8, run_id="a")[4:])
    imported = experiences(9, run_id="b", source="imported")[8:]
    store.append("experiences", imported)
    store.snapshot("two")
    found = store.diff("one", "two")
    assert {(d.table, d.added, d.removed) for d in found.tables} == {
        ("tasks", 2, 0),
        ("experiences", 5, 0),
        ("snapshots", 1, 0),
    }
    assert found.experiences == [
        {"run_id": "a", "source": "explorer", "added": 4, "removed": 0},
        {"run_id": "b", "source": "imported", "added": 1, "removed": 0},
    ]
    back = {d.table: (d.added, d.removed) for d in store.diff("two", "one").tables}
    assert back == {"tasks": (0, 2), "experiences": (0, 5), "snapshots": (0, 1)}
    assert store.diff("two").tables[0].table == "snapshots", "its own row is all that came"


def test_compaction_is_no_difference_and_deletion_is_one(store: Store) -> None:
    for e in experiences(4):
        store.append("experiences", [e])
    store.snapshot("one")
    assert store.maintain()["experiences"].after.fragments == 1
    assert [d.table for d in store.diff("one").tables] == ["snapshots"]
    store.dataset("experiences").delete("rollout_index < 3")
    [change] = [d for d in store.diff("one").tables if d.table == "experiences"]
    assert (change.added, change.removed) == (0, 3)


def test_a_difference_from_what_is_not_there_names_the_nearest(store: Store) -> None:
    store.snapshot("first")
    with pytest.raises(NotFoundError, match="no snapshot `frist`; did you mean `first`"):
        store.diff("first", "frist")


# dropping


def test_a_dropped_name_is_gone_with_its_tags_and_may_be_given_again(store: Store) -> None:
    store.append("tasks", [task(0)])
    store.snapshot("first")
    snapshots.drop(store, "first")
    assert list(snapshots.current(store)) == []
    assert store.dataset("tasks").tags.list() == {}
    for use in (store.at, lambda n: snapshots.drop(store, n)):
        with pytest.raises(NotFoundError, match="no snapshot `first`"):
            use("first")
    store.append("tasks", [task(1)])
    store.snapshot("first")
    assert store.at("first").count("tasks") == 2


def test_a_drop_that_was_killed_half_way_is_completed_by_dropping_again(store: Store) -> None:
    store.snapshot("first")
    versions = [{"name": n, "version": v} for n, v in store.versions().items()]
    store.append("snapshots", [{"name": "first", "tables": versions, "is_dropped": True}])
    assert "snapshot-first" in store.dataset("tasks").tags.list(), "killed before the tags went"
    with pytest.raises(NotFoundError):
        snapshots.drop(store, "first")
    assert store.dataset("tasks").tags.list() == {}


@pytest.mark.parametrize("status", ["running", "failed"])
def test_what_an_unfinished_run_works_on_is_dropped_only_by_force(
    store: Store, status: str
) -> None:
    store.append("job_events", [event(status, run_id="demo")])
    for name in ("demo.rows", "demo.tasks", "demo.other", "done.rows"):
        store.snapshot(name)
    store.append("job_events", [event("done", run_id="done")])
    for name in ("demo.rows", "demo.tasks"):
        with pytest.raises(QueryError, match=f"`{name}` is what run `demo` works on, and its `tra"):
            snapshots.drop(store, name)
    for name in ("demo.other", "done.rows"):
        snapshots.drop(store, name)
    snapshots.drop(store, "demo.rows", force=True)
    assert list(snapshots.current(store)) == ["demo.tasks"]


# going back


def test_a_restore_makes_tables_as_they_were_and_can_be_undone(store: Store) -> None:
    store.append("tasks", [task(0)])
    store.append("experiences", experiences(4))
    store.snapshot("one")
    store.append("experiences", experiences(8)[4:])
    store.append("scores", [{"experience_id": "g000/00", "scorer": "s", "scorer_version": "1"}])
    store.maintain()
    before = store.versions()
    done = restore(store, "one")
    assert (store.count("tasks"), len(ids(store)), store.count("scores")) == (1, 4, 0)
    assert done.tables.keys() == {"experiences", "scores"}, "the others had not changed"
    assert len(ids(store.at(before))) == 8, "history stays"
    undone = restore(store, done.undo)
    assert (undone.undo, undone.tables.keys()) == ("one", {"experiences", "scores"})
    assert (len(ids(store)), store.count("scores")) == (8, 1)
    assert restore(store, done.undo).tables == {}, "nothing is left to do"
    assert list(snapshots.current(store)) == ["one", "before-restore-one-1"]


def test_after_a_restore_vanished_ids_are_stored_anew_here_and_in_other_processes(
    store: Store,
) -> None:
    other = """
import sys
import rlake
from support.builders import experiences
store = rlake.connect(sys.argv[1])
print(store.append("experiences", experiences(8)).duplicates, flush=True)
sys.stdin.readline()
print(store.append("experiences", experiences(8, reward=1.0)[4:]).rows, flush=True)
"""
    store.append("experiences", experiences(4))
    store.snapshot("one")
    store.append("experiences", experiences(8)[4:])
    third = connect(store.uri)
    assert third.append("experiences", experiences(8)).duplicates == 8
    with python(other, store.uri) as process:
        assert said(process) == "8"
        restore(store, "one")
        assert go_on(process) == "4", "also with other content"
    for each in (store, third):
        assert each.append("experiences", experiences(8, reward=1.0)[4:]).duplicates == 4
        assert len(ids(each)) == 8


FOLLOWS = """
import sys
import rlake
from rlake.store.replay import Sampler
store = rlake.connect(sys.argv[1])
sampler = Sampler(store, max_draws=None)
while True:
    print(sampler.supply(1, 0).fresh, flush=True)
    sys.stdin.readline()
"""


def test_readers_notice_that_rows_are_gone(store: Store) -> None:
    store.append("experiences", experiences(4))
    store.snapshot("one")
    store.append("experiences", experiences(8)[4:])
    tail = ChangeFeed(["experience_id"])
    index = Index(connect(store.uri), grouped=True)
    sampler = Sampler(store, max_draws=1)
    assert (tail.read(store.dataset("experiences")).num_rows, tail.restarted) == (8, False)
    assert index.refresh()
    assert sampler.draw(6, step=1, policy_version=0) is not None
    with python(FOLLOWS, store.uri) as process:
        assert said(process) == "8"
        restore(store, "one")
        assert go_on(process) == "4"
        # as many rows come as went: their number alone tells nothing
        store.append("experiences", experiences(12)[8:])
        assert go_on(process) == "8"
    rows = tail.read(store.dataset("experiences"))
    assert (rows.num_rows, tail.restarted) == (8, True)
    assert index.refresh()
    assert (index.rebuilt, len(index)) == (True, 2)
    assert sampler.supply(1, 0).fresh == 4, "the four that came; the others were drawn"
    assert tail.read(store.dataset("experiences")).num_rows == 0
    assert not tail.restarted


def test_an_index_that_loses_all_its_rows_is_empty(store: Store) -> None:
    store.snapshot("empty")
    store.append("experiences", experiences(4))
    sampler = Sampler(store)
    assert sampler.supply(1, 0).fresh == 4
    restore(store, "empty")
    assert sampler.supply(1, 0).fresh == 0
    store.append("experiences", experiences(2))
    assert sampler.supply(1, 0).fresh == 2


def test_nothing_is_restored_while_a_job_runs(store: Store) -> None:
    store.snapshot("one")
    store.append("job_events", [event(run_id="demo")])
    with pytest.raises(QueryError, match="`train` of run `demo` is running, and would lose its"):
        restore(store, "one")
    assert store.count("job_events") == 1
    restore(store, "one", force=True)
    assert store.count("job_events") == 0
    with pytest.raises(NotFoundError, match="no snapshot `on`; did you mean `one`"):
        restore(store, "on")


def test_a_restore_waits_for_writers_and_they_for_it(store: Store) -> None:
    store.snapshot("one")
    store.append("tasks", [task(0)])
    goes = threading.Thread(target=lambda: restore(store, "one"))
    with locked(store, "tasks"):
        goes.start()
        goes.join(0.3)
        assert goes.is_alive()
        assert connect(store.uri).count("tasks") == 1
    goes.join(100)
    assert store.count("tasks") == 0


KILLED = """
import os, sys
import lance, rlake
from rlake.store.snapshots import restore
left = int(sys.argv[2])
whole = lance.LanceDataset.restore
def dying(self):
    global left
    if not left:
        os.kill(os.getpid(), 9)
    left -= 1
    whole(self)
lance.LanceDataset.restore = dying
restore(rlake.connect(sys.argv[1]), "one")
"""


@pytest.mark.parametrize("done", [1, 2])
def test_a_restore_that_was_killed_is_completed_by_doing_it_again(store: Store, done: int) -> None:
    store.snapshot("one")
    store.append("tasks", [task(0)])
    store.append("experiences", experiences(4))
    store.append("draws", [draw("g000/00")])
    with python(KILLED, store.uri, done) as process:
        process.wait(60)
    counts = [store.count(name) for name in ("draws", "experiences", "tasks")]
    assert counts.count(0) == done, "it was killed half-way"
    again = restore(store, "one")
    assert [store.count(name) for name in ("draws", "experiences", "tasks")] == [0, 0, 0]
    assert again.undo == "before-restore-one-1", "that of the killed one, which has all rows"
    restore(store, again.undo)
    assert [store.count(name) for name in ("draws", "experiences", "tasks")] == [1, 4, 1]


def test_two_restores_of_one_snapshot_have_an_undo_each(store: Store) -> None:
    store.snapshot("one")
    undone = []
    for n in range(2):
        store.append("tasks", [task(n)])
        undone.append(restore(store, "one").undo)
    assert undone == ["before-restore-one-1", "before-restore-one-2"]
    assert [store.at(name).scan("tasks").collect()["answer"].item() for name in undone] == [
        "0",
        "2",
    ]


VERSIONS = {"first": 0, "second": 1, "last": -1}
"""Appends whose version is gone back to."""


@given(st.lists(st.sampled_from(["append", *VERSIONS, "compact", "delete", "read"]), max_size=12))
@settings(max_examples=12)
@example(["append", "append", "first", "read", "second", "read"])
@example(["append", "append", "first", "append", "read", "second", "read"])
@example(["append", "append", "read", "compact", "read", "first", "read", "last", "read"])
def test_a_tail_knows_the_rows_that_there_are(empty_store: Path, actions: list[str]) -> None:
    """What a reader of new rows has collected is what is stored, whatever happened in between."""
    with TemporaryDirectory() as folder:
        shutil.copytree(empty_store, Path(folder, "store"))
        store = connect(Path(folder, "store"))
        tail, known = ChangeFeed(["experience_id"]), []
        made = iter(experiences(24))
        kept = []
        for action in [*actions, "read"]:
            dataset = store.dataset("experiences")
            if action == "append":
                store.append("experiences", [next(made), next(made)])
                kept.append(store.dataset("experiences").version)
            elif action in VERSIONS and len(kept) > 1:
                store.open_at("experiences", kept[VERSIONS[action]]).restore()
            elif action == "compact":
                dataset.optimize.compact_files()
            elif action == "delete":
                dataset.delete("rollout_index = 1")
            elif action == "read":
                rows = tail.read(dataset)["experience_id"].to_pylist()
                known = rows if tail.restarted else known + rows
                assert sorted(known) == ids(store)
