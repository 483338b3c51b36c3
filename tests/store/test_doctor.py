"""The doctor finds each fault that is really planted, and names it with the way out."""

import multiprocessing
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.builders import experiences, task
from support.table_rows import draw, event

from rlake.store import Store, connect, doctor
from rlake.store.doctor import Finding, diagnose
from rlake.store.maintenance import indexes, old_versions


@pytest.fixture(autouse=True)
def start_method() -> Iterator[None]:
    """Begin as a fresh interpreter does: a library may have settled how processes start."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def filled(store: Store) -> Store:
    for i in range(4):
        store.append("tasks", [task(i)])
    store.append("experiences", experiences(8))
    return store


def told(store: Store, level: str, **options: Any) -> list[Finding]:
    return [f for f in diagnose(connect(store.uri), **options) if f.level == level]


def one(store: Store, level: str, words: str) -> Finding:
    """The only finding of a level, or of those the only one with the words."""
    [found] = [f for f in told(store, level) if words in f.what]
    assert found.way_out
    return found


def data_of(store: Store, name: str) -> list[Path]:
    assert store.folder is not None
    return sorted((store.folder / f"{name}.lance" / "data").iterdir())


def test_a_sound_store_has_nothing_wrong(filled: Store) -> None:
    filled.snapshot("s")
    filled.branch("b")
    filled.maintain()
    assert told(filled, "error") == []
    assert [f for f in told(filled, "warning") if "free" not in f.what] == []
    [parts] = [f.what for f in told(filled, "ok") if f.what.startswith("rlake ")]
    for part in ("Python 3", "pylance 14", "lancedb 0.", "duckdb 2", "polars 2", "pyarrow 2"):
        assert part in parts
    said = [f.what for f in told(filled, "ok")]
    assert any(what.startswith("`tasks`: 4 rows in 1 file, ") for what in said)
    assert {"1 snapshot", "1 branch"} <= {*said}


def test_a_missing_file_is_named(filled: Store) -> None:
    lost = data_of(filled, "tasks")[0]
    lost.unlink()
    found = one(filled, "error", "`tasks`: 1 row in")
    assert lost.name in found.what
    assert "snapshot restore" in found.way_out


@pytest.mark.parametrize("damage", ["end", "cut", "empty"])
def test_a_corrupted_file_is_named(filled: Store, damage: str) -> None:
    [broken] = data_of(filled, "experiences")
    whole = broken.read_bytes()
    broken.write_bytes({"end": whole[:-40] + b"x" * 40, "cut": whole[:-300], "empty": b""}[damage])
    assert broken.name in one(filled, "error", "`experiences`: 8 rows in").what


def test_a_table_that_does_not_open_is_named(filled: Store) -> None:
    assert filled.folder is not None
    for path in (filled.folder / "tasks.lance" / "_versions").iterdir():
        path.write_bytes(b"no manifest")
    found = [f for f in diagnose(filled) if f.level == "error"]
    assert any("cannot open table `tasks`" in f.what for f in found)


def test_a_table_that_lost_its_newest_version_is_named(filled: Store) -> None:
    version = filled.dataset("experiences").version
    drawn_from = [{"name": "experiences", "version": version}]
    filled.append("draws", [draw("g000/00", drawn_from=drawn_from)])
    assert told(filled, "error") == []
    manifests = Path(filled.uri) / "experiences.lance" / "_versions"
    min(manifests.glob("*.manifest")).unlink()  # they count down: the newest sorts first
    found = one(filled, "error", "its newest versions are gone")
    assert f"`experiences` stands at version {version - 1}" in found.what


def test_a_snapshot_whose_version_is_gone_is_named(filled: Store) -> None:
    filled.snapshot("s")
    filled.append("tasks", [task(9)])
    filled.dataset("tasks").tags.delete(next(iter(filled.dataset("tasks").tags.list())))
    filled.maintain(grace=0)
    found = one(filled, "error", "snapshot `s` names version 5 of `tasks`, which is gone")
    assert "rlake snapshot drop s" in found.way_out


def test_a_branch_that_is_gone_is_named(filled: Store) -> None:
    filled.branch("b")
    assert filled.folder is not None
    shutil.rmtree(filled.folder / "tasks.lance" / "tree" / "b")
    assert "rlake branch drop b" in one(filled, "error", "branch `b` has no `tasks`").way_out


def test_files_of_no_version_are_named_when_they_are_old(filled: Store) -> None:
    lost = data_of(filled, "tasks")[0].with_name("lost.lance")
    lost.write_bytes(b"half")
    assert told(filled, "note") == told(connect(filled.uri), "note")
    assert not any("lost.lance" in f.what for f in told(filled, "note"))
    long_ago = datetime.now().timestamp() - old_versions.ORPHAN_SECONDS - 60
    os.utime(lost, (long_ago, long_ago))
    assert "rlake maintain" in one(filled, "note", "`tasks`: 1 file of 0.0 MB").way_out


def test_rows_from_the_future_are_counted(filled: Store) -> None:
    rows = [{**task(50).row(), "created_at": datetime.now(UTC) + timedelta(days=1)}]
    filled.append("tasks", rows)
    assert "clock" in one(filled, "warning", "`tasks`: 1 row from the future").what


def test_a_run_that_was_killed_is_told_from_one_that_runs(filled: Store) -> None:
    filled.append("job_events", [event(job=job) for job in ("train", "explore", "evaluate")])
    lives = {"train": False, "explore": True, "evaluate": None}
    found = diagnose(filled, is_live=lambda _, run, job: lives[job])
    said = {f.what: f.level for f in found if "of run `r`" in f.what}
    assert said == {
        "`train` of run `r` is on record as running, and no process is it: it was killed": (
            "warning"
        ),
        "`explore` of run `r` is running": "ok",
        "`evaluate` of run `r` is on record as running, in a place not seen here": "note",
    }


class Usage(NamedTuple):
    free: int


@pytest.mark.parametrize(("free", "level"), [(50 << 20, "error"), (1 << 30, "warning")])
def test_a_disk_that_fills_up_is_told(
    filled: Store, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(free))
    one(filled, level, "GB are free")


def test_what_maintain_would_fix_is_told(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MANY_FILES", 4)
    monkeypatch.setattr(doctor, "_MANY_VERSIONS", 4)
    monkeypatch.setattr(indexes, "_MANY_NEW_ROWS", 8)
    wanted = (indexes.Index("experiences", "experience_id", "BTREE", 8),)
    monkeypatch.setattr(indexes, "INDEXES", wanted)
    for words, level in (
        ("`tasks`: 4 small files", "warning"),
        ("`tasks`: 5 versions", "warning"),
        ("`experiences`: 8 rows not in its indexes", "note"),
    ):
        assert "rlake maintain" in one(filled, level, words).way_out
    filled.maintain(grace=0)
    fixed = ("small files", "versions slow", "indexes yet")
    assert not any(w in f.what for f in diagnose(filled) for w in fixed)


def test_starting_processes_by_fork_is_told(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(method: str) -> None:
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda **_: method)

    chosen("fork")
    assert "spawn" in one(filled, "warning", "by fork").way_out
    chosen("spawn")
    assert not any("by fork" in f.what for f in diagnose(filled))
