"""Leases: one writer at a time where there are no file locks, whoever is killed or falls asleep."""

import signal
import subprocess
import time
from pathlib import Path

import lance
import pytest
from support.builders import experiences, task
from support.processes import said, start

from rlake.store import Store, connect, leases
from rlake.store.errors import BusyError, ConflictError, NotAStoreError, StoreError
from rlake.store.schema import TABLES
from rlake.store.validate import conform

SLEEPER = """
import sys
import rlake
from rlake.store import leases
from rlake.store.errors import StoreError
from support.builders import task
leases.LEASE_SECONDS = 1.0
store = rlake.connect(sys.argv[1])
def batches():
    print("looked", flush=True)
    sys.stdin.readline()
    yield [task(n) for n in range(4)]
try:
    print(store.append_stream("tasks", batches()))
except StoreError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def lake(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of a folder, used as one that has no file locks."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1.0)
    return connect(f"file://{store.uri}")


def sleeper(lake: Store) -> "subprocess.Popen[str]":
    """Start a writer that holds the lease and has seen what the table holds."""
    writer = start(SLEEPER, lake.uri)
    assert said(writer) == "looked"
    return writer


def test_a_store_with_leases_appends_and_reads_as_any_other(lake: Store) -> None:
    assert lake.append("experiences", experiences(8)).rows == 8
    assert connect(lake.uri).append("experiences", experiences(10)).rows == 2
    assert lake.sql("SELECT count(*) FROM experiences").fetchall() == [(10,)]


def test_a_folder_that_is_no_store_is_refused_as_well(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    with pytest.raises(NotAStoreError, match="is not a store: it holds 1 other entries"):
        connect(f"file://{tmp_path}")
    with pytest.raises(NotAStoreError, match="no store at"):
        connect(f"file://{tmp_path}/none", create=False)


def test_a_lease_of_a_killed_writer_is_taken_over(
    lake: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = sleeper(lake)
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=100)
    began = time.monotonic()
    assert lake.append("tasks", [task(0)]).rows == 1
    assert time.monotonic() - began >= 0.9, "nobody knew at once that it was killed"
    monkeypatch.setattr(leases, "LEASE_SECONDS", 40.0)
    began = time.monotonic()
    lake.append("tasks", [task(1)])
    assert time.monotonic() - began < 20, "it was given back"


def test_a_lease_is_renewed_while_its_holder_works(
    lake: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", 2.5)
    monkeypatch.setattr(leases, "LOCK_SECONDS", 4.0)
    writer = sleeper(lake)
    with pytest.raises(BusyError, match=r"gave up after 4 s: `\S+` is writing `tasks`"):
        lake.append_stream("tasks", [[task(9)]])
    told, _ = writer.communicate("go\n", timeout=100)
    assert told.startswith("Appended(rows=4, duplicates=0")
    assert lake.append("tasks", [task(n) for n in range(4)]).duplicates == 4


def test_a_writer_that_slept_through_its_lease_stores_nothing_twice(lake: Store) -> None:
    writer = sleeper(lake)
    writer.send_signal(signal.SIGSTOP)
    assert lake.append("tasks", [task(n) for n in range(6)]).rows == 6
    writer.send_signal(signal.SIGCONT)
    told, _ = writer.communicate("go\n", timeout=100)
    assert told.startswith("BusyError cannot write to `tasks`"), told
    counts = lake.sql("SELECT count(*), count(DISTINCT task_id) FROM tasks").fetchall()
    assert counts == [(6, 6)]


def test_a_writer_that_slept_before_it_looked_does_not_write_without_the_lease(
    lake: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, look = connect(lake.uri), lake.dataset
    monkeypatch.setattr("rlake.store.leases._Lease._renew", lambda *_: None)

    def late(name: str, *, to_write: bool = False) -> lance.LanceDataset:
        other.append("tasks", [task(0)])  # takes the lease over, and gives it back
        return look(name, to_write=to_write)

    monkeypatch.setattr(lake, "dataset", late)
    with pytest.raises(BusyError, match="the lease ran out and was taken over"):
        lake.append_stream("tasks", [[task(1)]])
    monkeypatch.undo()
    assert lake.count("tasks") == 1


def test_after_an_append_that_failed_nothing_of_it_can_still_arrive(lake: Store) -> None:
    before = lake.open_at("tasks")
    with pytest.raises(ZeroDivisionError):
        lake.append_stream("tasks", ([task(n // 0)] for n in (1,)))
    lake.append("tasks", [task(0)])
    late = lance.fragment.write_fragments(
        conform(TABLES["tasks"], [task(9)]), before, mode="append"
    )
    with pytest.raises(OSError, match="preempted"):
        lance.LanceDataset.commit(
            before, lance.LanceOperation.Append(late), read_version=before.version
        )


def test_rows_that_are_refused_give_the_lease_back_clean(lake: Store) -> None:
    [one] = experiences(1, reward=1.0)
    lake.append("experiences", [one])
    version = lake.versions()["experiences"]
    with pytest.raises(ConflictError):
        lake.append("experiences", experiences(1, reward=0.0))
    lake.append("experiences", experiences(2, reward=1.0))
    assert lake.versions()["experiences"] == version + 1, "nobody had to fence"


def test_a_lease_keeps_few_versions(lake: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_KEPT_VERSIONS", 4)
    monkeypatch.setattr(leases, "_KEPT_MINUTES", 0)
    for n in range(20):
        lake.append("tasks", [task(n)])
    folder = Path(lake.uri.removeprefix("file://")) / ".locks" / "tasks.lance" / "_versions"
    assert len(list(folder.iterdir())) < 10


def test_a_folder_without_file_locks_says_what_to_do(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(StoreError, match=r"has no file locks; open the store as `file:///"):
        store.append("tasks", [task(0)])
