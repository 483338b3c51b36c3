"""Group commit: few commits, no row lost, none refused for another's fault, bounded waiting."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from support.builders import experiences, rows, task

from rlake.store import Appended, Store
from rlake.store.append import append_all
from rlake.store.errors import ConflictError, SchemaError, StarvedError, StoreError


@pytest.fixture
def held(store: Store, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Commits of `store` wait until this is set."""
    free = threading.Event()

    def later(store: Store, name: str, parts: Sequence[Any]) -> list[Appended]:
        assert free.wait(100)
        return append_all(store, name, parts)

    monkeypatch.setattr("rlake.store.group_commit.append_all", later)
    return free


def test_many_submissions_are_few_commits_and_each_is_told_what_was_done(store: Store) -> None:
    before = store.versions()["tasks"]
    with store.committer(max_seconds=60.0) as committer:  # however slowly they come
        futures = [committer.submit("tasks", [task(n), task(n + 1)]) for n in range(0, 100, 2)]
    assert [f.result().rows for f in futures] == [2] * 50
    assert store.versions()["tasks"] - before <= 3
    assert store.count("tasks") == 100


def test_a_commit_is_made_when_enough_bytes_wait(store: Store) -> None:
    with store.committer(max_seconds=60.0, max_bytes=1) as committer:
        assert committer.submit("tasks", [task(0)]).result(10).rows == 1


def test_a_commit_is_made_when_a_row_waited_long_enough(store: Store) -> None:
    with store.committer(max_seconds=0.05) as committer:
        assert committer.submit("tasks", [task(0)]).result(10).rows == 1


def test_a_flush_does_not_wait_for_more(store: Store) -> None:
    with store.committer(max_seconds=60.0) as committer:
        future = committer.submit("tasks", [task(0)])
        committer.flush()
        assert future.done()
        assert store.count("tasks") == 1


def test_what_is_acknowledged_is_stored(store: Store, held: threading.Event) -> None:
    with store.committer() as committer:
        future = committer.submit("tasks", [task(0)])
        time.sleep(0.1)
        assert (future.done(), store.count("tasks")) == (False, 0)
        held.set()
        future.result(10)
        assert store.count("tasks") == 1


def test_rows_of_each_thread_are_stored_in_its_order(store: Store) -> None:
    def submit(me: int) -> None:
        for n in range(30):
            made = experiences(1, run_id=str(me), experience_id=f"{me}/{n:03d}", batch=n)
            committer.submit("experiences", made)

    with store.committer(max_seconds=0.01) as committer, ThreadPoolExecutor(4) as threads:
        list(threads.map(submit, range(4)))
    for me in range(4):
        told = store.sql(f"SELECT batch FROM experiences WHERE run_id = '{me}' ORDER BY created_at")
        assert [step for (step,) in told.fetchall()] == list(range(30))


def test_a_bad_submission_fails_alone(store: Store, held: threading.Event) -> None:
    [one] = experiences(1, reward=1.0)
    with store.committer() as committer:
        first = committer.submit("tasks", [task(0)])  # under way while the others gather
        good = committer.submit("experiences", [one])
        other = committer.submit("experiences", [replace(one, reward=0.0)])
        unfit = committer.submit("experiences", [one.row() | {"reward": "high"}])
        later = committer.submit("experiences", experiences(4, reward=1.0)[1:])
        held.set()
    assert (first.result().rows, good.result().rows, later.result().rows) == (1, 1, 3)
    with pytest.raises(ConflictError, match="other content"):
        other.result()
    with pytest.raises(SchemaError, match="must be double, got 'high'"):
        unfit.result()
    assert store.count("experiences") == 4


def test_the_same_rows_submitted_twice_are_stored_once(store: Store) -> None:
    with store.committer(max_seconds=0.2) as committer:
        done = [committer.submit("tasks", [task(0), task(1)]) for _ in range(3)]
    assert [(f.result().rows, f.result().duplicates) for f in done] == [(2, 0), (0, 2), (0, 2)]


def test_a_full_queue_makes_writers_wait_for_room(store: Store, held: threading.Event) -> None:
    size = rows([task(0)]).to_arrow().nbytes
    with store.committer(queue_bytes=2 * size) as committer:
        futures = [committer.submit("tasks", [task(n)]) for n in range(2)]
        threading.Timer(0.1, held.set).start()
        futures.append(committer.submit("tasks", [task(2)]))
        assert held.is_set(), "nothing was stored yet, so there was no room"
    assert [f.result().rows for f in futures] == [1, 1, 1]


def test_a_queue_that_stays_full_is_said_to_be_so(store: Store, held: threading.Event) -> None:
    size = rows([task(0)]).to_arrow().nbytes
    with store.committer(queue_bytes=2 * size, wait_seconds=0.2) as committer:
        for n in range(2):
            committer.submit("tasks", [task(n)])
        said = r"gave up after 0.2 s: [\d,]+ bytes for `tasks` wait for room: [\d,]+ of [\d,]+"
        with pytest.raises(StarvedError, match=said):
            committer.submit("tasks", [task(2)])
        held.set()
    assert store.count("tasks") == 2


def test_rows_larger_than_the_queue_are_taken_when_it_is_empty(store: Store) -> None:
    with store.committer(queue_bytes=1, max_bytes=1) as committer:
        done = [committer.submit("experiences", experiences(64)[i : i + 8]) for i in (0, 8, 16)]
    assert [f.result().rows for f in done] == [8, 8, 8]


def test_a_failing_store_fails_all_that_wait_and_the_next_may_succeed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(store: Store, name: str, parts: Sequence[Any]) -> list[Appended]:
        raise StoreError("the disk is full")

    with store.committer(max_seconds=0.1) as committer:
        with monkeypatch.context() as patch:
            patch.setattr("rlake.store.group_commit.append_all", broken)
            failed = [committer.submit("tasks", [task(n)]) for n in range(3)]
            committer.flush()
        for future in failed:
            with pytest.raises(StoreError, match="the disk is full"):
                future.result()
        assert committer.submit("tasks", [task(0)]).result(10).rows == 1


def test_rows_without_a_time_get_that_of_their_commit_and_others_keep_theirs(store: Store) -> None:
    early = datetime(2020, 1, 1, tzinfo=UTC)
    with store.committer(max_seconds=60.0) as committer:
        committer.submit("tasks", [task(0)])
        committer.submit("tasks", [task(1).row() | {"created_at": early}])
        submitted = datetime.now(UTC)
        time.sleep(0.05)
    told = store.sql("SELECT created_at FROM tasks ORDER BY created_at DESC").fetchall()
    [(late,), (kept,)] = told
    assert late > submitted
    assert kept == early


def test_a_cancelled_submission_is_not_stored(store: Store, held: threading.Event) -> None:
    with store.committer() as committer:
        committer.submit("experiences", experiences(1))
        time.sleep(0.1)  # it is under way
        future = committer.submit("tasks", [task(0)])
        assert future.cancel()
        held.set()
    assert (store.count("experiences"), store.count("tasks")) == (1, 0)


def test_a_closed_committer_takes_nothing(store: Store) -> None:
    committer = store.committer()
    committer.close()
    committer.close()
    with pytest.raises(StoreError, match="the committer is closed"):
        committer.submit("tasks", [task(0)])
