"""Many processes write to one table and read it: nothing is lost, each writer's order is kept."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bench.writing import ROWS, WRITER
from support.processes import said, start, tell

from rlake.store import Store, connect, locks
from rlake.store.errors import BusyError, StoreError

PROC_LOCKS = Path("/proc/locks")

READER = """
import json, sys, time
import rlake
lake = rlake.connect(sys.argv[1], create=False)
print("ready", flush=True)
sys.stdin.readline()
seen, looks, wrong = {}, 0, []
while not seen or sum(seen.values()) < int(sys.argv[2]) or looks < 3:
    rows = lake.sql(
        "SELECT run_id, count(DISTINCT batch), max(batch), count(*) FROM experiences GROUP BY ALL"
    ).fetchall()
    for run, steps, newest, n in rows:
        if steps != newest or n != 32 * steps or newest < seen.get(run, 0):
            wrong.append((run, steps, newest, n, seen.get(run, 0)))
        seen[run] = newest
    looks += 1
    time.sleep(0.25)
print(json.dumps([looks, wrong]), flush=True)
"""

ORDER = """
    SELECT count(*) FROM (
        SELECT batch, lag(batch) OVER (PARTITION BY run_id ORDER BY created_at) AS before
        FROM experiences) WHERE batch < before
"""


@pytest.fixture
def ended() -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that are not left behind."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("many", "few", "seconds"),
    [(4, 1, 3.0), pytest.param(8, 2, 60.0, marks=[pytest.mark.slow, pytest.mark.alone])],
)
def test_many_writers_and_readers(
    store: Store, many: int, few: int, seconds: float, ended: list["subprocess.Popen[str]"]
) -> None:
    writers = [start(WRITER, store.uri, me, seconds) for me in range(many)]
    readers = [start(READER, store.uri, 2 * many) for _ in range(few)]
    ended += [*writers, *readers]
    for process in (*writers, *readers):
        assert said(process) == "ready"
    for process in (*writers, *readers):
        tell(process)
    taken = [json.loads(w.communicate(timeout=seconds + 60)[0]) for w in writers]
    told = [json.loads(r.communicate(timeout=100)[0]) for r in readers]

    assert all(looks >= 3 and wrong == [] for looks, wrong in told), told
    appends = [len(t) for t in taken]
    assert min(appends) >= 2, "nobody starved"
    rows = store.sql(
        "SELECT run_id, count(*), count(DISTINCT experience_id), max(batch) FROM experiences "
        "GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    assert rows == [(str(me), ROWS * n, ROWS * n, n) for me, n in enumerate(appends)]
    assert store.sql(ORDER).fetchall() == [(0,)]
    if seconds >= 60:
        assert np.percentile(np.concatenate(taken), 99) < 1.0


@pytest.mark.skipif(not PROC_LOCKS.exists(), reason="only Linux tells who waits for a lock")
def test_a_lock_is_granted_in_the_order_of_asking(store: Store) -> None:
    order: list[int] = []

    def take(me: int) -> None:
        with locks.locked(store, "tasks"):
            order.append(me)

    threads = [threading.Thread(target=take, args=(me,)) for me in range(6)]
    with locks.locked(store, "tasks"):
        for place, thread in enumerate(threads):
            thread.start()
            until_waiting(store, place + 1)
        assert order == []
    for thread in threads:
        thread.join(100)
    assert order == list(range(6))


def until_waiting(store: Store, n: int) -> None:
    """Wait until the system has n in the queue of the lock of `tasks`."""
    assert store.folder is not None
    inode = f":{(store.folder / '.locks' / 'tasks.lock').stat().st_ino} "
    deadline = time.monotonic() + 100
    while sum("->" in held and inode in held for held in PROC_LOCKS.read_text().splitlines()) < n:
        assert time.monotonic() < deadline, f"{n} threads never waited"
        time.sleep(0.001)


def test_who_waits_too_long_is_told_so_and_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locks.locked(store, "tasks"), monkeypatch.context() as patch:
        patch.setattr(locks, "LOCK_SECONDS", 0.2)
        with pytest.raises(BusyError, match=r"gave up after 0.2 s: another process is writing"):
            locks.locked(store, "tasks").__enter__()
    with locks.locked(store, "tasks"):
        pass
    before = threading.active_count()
    with locks.locked(store, "tasks"):
        pass
    assert threading.active_count() <= before


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    lake = connect(tmp_path / "lake")
    place = tmp_path / "lake" / ".locks"
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    place.write_text("in the way")
    with pytest.raises(StoreError, match=r"cannot write to `tasks`: .*; nothing was stored"):
        lake.append("tasks", [{"task_id": "t", "taskset": "s", "split": "x", "messages": "[]"}])
