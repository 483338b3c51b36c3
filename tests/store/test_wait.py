"""Waits are bounded, wake up at once, and say what they waited for."""

import threading
import time

import pytest
from support.builders import task
from support.processes import said, start, tell

from rlake.store import Store
from rlake.store.errors import StarvedError

LATER = """
import sys, time
import rlake
from rlake.store import Task
store = rlake.connect(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    store.append("tasks", [Task.ask(line.strip())])
    print(time.time(), flush=True)
"""


def wait(
    store: Store, n: int, *, seconds: float = 20.0, stop: threading.Event | None = None
) -> int:
    """Wait for n tasks."""
    return store.wait_for(
        lambda: store.count("tasks") if store.count("tasks") >= n else None,
        tables=("tasks",),
        seconds=seconds,
        describe=lambda: f"need {n} tasks, have {store.count('tasks')}",
        stop=stop,
    )


def test_what_is_there_is_not_waited_for(store: Store) -> None:
    store.append("tasks", [task(0)])
    assert wait(store, 1, seconds=0.0) == 1


def test_a_commit_of_another_process_wakes_a_waiter_at_once(store: Store) -> None:
    writer = start(LATER, store.uri)
    assert said(writer) == "ready"
    late = []
    for n in range(1, 51):  # ten rounds of five: what else runs here may delay both processes
        threading.Timer(0.1, tell, (writer, f"? {n}")).start()
        wait(store, n)
        woke = time.time()
        late.append(woke - float(said(writer)))
        if n % 5 == 0 and sorted(late[-5:])[2] < 0.05:
            break
    writer.communicate(timeout=100)
    assert sorted(late[-5:])[2] < 0.05, f"the median of no five of {late}"


def test_a_commit_of_this_process_wakes_a_waiter(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that only a wake-up can end it
    monkeypatch.setattr("rlake.store.tables.POLL_SECONDS", 30.0)
    threading.Timer(0.1, lambda: store.append("tasks", [task(0)])).start()
    began = time.monotonic()
    assert wait(store, 1) == 1
    assert time.monotonic() - began < 15.0


def test_a_wait_ends_and_says_what_it_waited_for(store: Store) -> None:
    store.append("tasks", [task(0)])
    began = time.monotonic()
    with pytest.raises(StarvedError, match=r"^gave up after 0.2 s: need 2 tasks, have 1$") as error:
        wait(store, 2, seconds=0.2)
    assert 0.2 <= time.monotonic() - began < 15.0
    assert isinstance(error.value, TimeoutError)


def test_a_wait_ends_when_the_run_is_stopped(store: Store) -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    with pytest.raises(StarvedError, match=r"^the run was stopped: need 1 tasks, have 0$"):
        wait(store, 1, stop=stop)
    assert time.monotonic() - began < 15.0


def test_only_the_tables_named_wake_a_waiter(store: Store) -> None:
    looks = []
    threading.Timer(0.05, lambda: store.append("tasks", [task(0)])).start()
    with pytest.raises(StarvedError):
        store.wait_for(
            lambda: looks.append(1), tables=("policies",), seconds=0.3, describe=lambda: "a policy"
        )
    assert len(looks) == 1, "it looks again only after a commit"
