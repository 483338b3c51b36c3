"""Maintenance: fewer files and versions, the same rows, beside those who read and write."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from filelock import FileLock
from support.builders import experiences, task
from support.processes import start

from rlake.store import Store, connect
from rlake.store.errors import StoreError
from rlake.store.ids import row_digests
from rlake.store.maintenance import compaction, indexes, old_versions
from rlake.store.maintenance.indexes import Index


def digests(store: Store) -> dict[str, list[str]]:
    """Every row of the tables that these tests write, as digests."""
    names = ("tasks", "experiences", "scores")
    return {n: sorted(row_digests(store.dataset(n).to_table())) for n in names}


def fill(store: Store, commits: int, *, first: int = 0) -> None:
    for i in range(first, first + commits):
        store.append("tasks", [task(i)])
        tried = experiences(2, reward=1.0, task_id=task(i).task_id, group_id=f"g{i}")
        named = [replace(e, experience_id=f"e{i}/{j}") for j, e in enumerate(tried)]
        store.append("experiences", named)


def versions(store: Store, name: str) -> list[int]:
    return [ref["version"] for ref in store.open_at(name).version_refs()]


def test_every_snapshot_reads_the_same_rows_after_maintenance(store: Store) -> None:
    before = {}
    for n in range(5):
        fill(store, 6, first=6 * n)
        store.snapshot(f"s{n}")
        before[f"s{n}"] = digests(store.at(f"s{n}"))
    fill(store, 10, first=100)
    now = digests(store)
    report = store.maintain(grace=0)
    assert report["experiences"].before.fragments == 40
    assert report["experiences"].after.fragments == 1
    assert report["experiences"].after.num_bytes < report["experiences"].before.num_bytes
    again = connect(store.uri)
    assert digests(again) == now
    assert {name: digests(again.at(name)) for name in before} == before
    assert len(versions(store, "experiences")) == 1 + 5 + 1, "the first, snapshots, and the newest"


def test_a_branch_and_what_it_left_from_survive_maintenance(store: Store) -> None:
    fill(store, 6)
    branch = store.branch("trial")
    fill(store, 6, first=10)
    fill(branch, 6, first=20)
    on_main, on_branch = digests(store), digests(branch)
    for _ in range(2):
        assert branch.maintain(grace=0)["tasks"].after.fragments == 1
        assert store.maintain(grace=0)["tasks"].after.fragments == 1
    again = connect(store.uri)
    assert (digests(again), digests(again.on_branch("trial"))) == (on_main, on_branch)


def test_what_a_reader_holds_stays_for_the_grace_period(store: Store) -> None:
    fill(store, 6)
    time.sleep(0.5)
    # made before the grace period began, and the newest one until a moment ago
    held = store.open_at("tasks")
    store.append("tasks", [task(100)])
    store.maintain(grace=0.4)
    assert held.to_table().num_rows == store.open_at("tasks", 7).to_table().num_rows == 6
    assert versions(store, "tasks")[:3] == [1, 7, 8], "the first, the held one, newer ones"
    store.maintain(grace=0)
    assert 7 not in versions(store, "tasks")


def test_a_clock_that_is_wrong_removes_nothing_that_is_young(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 6)
    assert store.folder is not None
    young = store.folder / "tasks.lance" / "data" / "young.lance"
    young.write_bytes(b"half of a batch")
    before = versions(store, "tasks")
    monkeypatch.setattr(old_versions, "time", lambda: time.time() + 10 * 24 * 3600)
    store.maintain()
    assert young.exists(), "its writer may be about to commit"
    assert set(before) <= set(versions(store, "tasks")), "a reader may hold them"


def test_a_version_is_as_young_as_its_file_where_its_writers_clock_is_behind(store: Store) -> None:
    fill(store, 6)
    assert store.folder is not None
    later = time.time() + 1000  # the versions themselves say now, which is behind it
    for path in (store.folder / "tasks.lance" / "_versions").glob("*.manifest"):
        os.utime(path, (later, later))
    before = versions(store, "tasks")
    store.maintain(grace=100)
    store.maintain(grace=0)
    assert set(before) <= set(versions(store, "tasks"))


def test_a_version_is_kept_ten_minutes_when_nothing_else_is_said(store: Store) -> None:
    fill(store, 6)
    store.maintain()
    assert versions(store, "tasks")[:7] == [1, 2, 3, 4, 5, 6, 7]


def test_maintenance_of_what_is_in_order_changes_nothing(store: Store) -> None:
    store.append("tasks", [task(0)])
    before = store.versions()
    for only_due in (True, False):
        report = store.maintain(only_due=only_due)
        assert store.versions() == before
    assert report["tasks"].before.fragments == report["tasks"].after.fragments == 1
    assert store.maintain(only_due=True).tables == ()


def test_a_dry_run_tells_what_would_be_done(store: Store) -> None:
    fill(store, 12)
    before, report = store.versions(), store.maintain(dry_run=True, grace=0)
    assert store.versions() == before
    assert report.is_dry_run
    done = store.maintain(grace=0)
    for name in ("tasks", "experiences"):
        told, found = report[name].after, done[name].after
        assert (told.fragments, told.new_rows) == (found.fragments, found.new_rows)
        assert told.versions <= found.versions, "the merge makes versions of its own"
        assert told.num_bytes < report[name].before.num_bytes


def test_the_loop_merges_when_it_is_due_and_rewrites_rows_seldom(store: Store) -> None:
    merged = 0
    for i in range(120):
        store.append("tasks", [task(i)])
        for cared in store.maintain(only_due=True).tables:
            merged += 1
            assert cared.after.fragments < cared.before.fragments
    assert 5 <= merged <= 20
    assert len(store.dataset("tasks").get_fragments()) <= 16
    assert store.scan("tasks").collect()["task_id"].n_unique() == 120


def test_large_rows_are_merged_into_files_of_fewer_rows(store: Store) -> None:
    for i in range(3):
        long = experiences(1, experience_id=f"e{i}", response_text="x" * 1_000_000)
        noise = [{"role": "user", "content": os.urandom(2_000_000).hex()}]
        store.append("experiences", [replace(long[0], messages=noise)])
    assert compaction.rows_a_file(store.dataset("experiences")) < 300


def test_old_versions_are_due_when_they_are_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_versions, "_MANY_VERSIONS", 10)
    fill(store, 20)
    store.maintain(only_due=True)
    assert len(versions(store, "tasks")) > 20, "they are too young"
    store.maintain(only_due=True, grace=0)
    assert len(versions(store, "tasks")) <= 4


def test_files_of_killed_writers_go_after_a_day_and_those_of_others_stay(store: Store) -> None:
    fill(store, 3)
    store.branch("trial").append("tasks", [task(50)])
    store.snapshot("then")
    before = digests(store)
    assert store.folder is not None
    data = store.folder / "tasks.lance" / "data"
    linked = store.folder.with_name("linked")
    linked.symlink_to(store.folder)
    for path in store.folder.glob("*.lance/**/*"):
        os.utime(path, (0, 0))
    lost, fresh = data / "lost.lance", data / "fresh.lance"
    for path in (lost, fresh):
        path.write_bytes(b"half of a batch")
    an_age = time.time() - old_versions.ORPHAN_SECONDS - 60
    os.utime(lost, (an_age, an_age))
    connect(linked).maintain(grace=0)
    assert not lost.exists()
    connect(linked).on_branch("trial").maintain(grace=0)
    assert fresh.exists(), "its writer may be about to commit"
    assert digests(connect(store.uri)) == digests(connect(store.uri).at("then")) == before
    assert connect(store.uri).on_branch("trial").count("tasks") == 4


def test_the_second_of_two_is_told_who_is_at_it(store: Store) -> None:
    fill(store, 3)
    store.maintain(dry_run=True)
    assert store.folder is not None
    before = store.versions()
    with FileLock(store.folder / ".locks" / "maintain.lock"):
        report = store.maintain()
    assert str(report).startswith(f"nothing done: process {os.getpid()} on ")
    assert store.versions() == before
    assert store.maintain().busy is None


def test_the_past_is_not_maintained(store: Store) -> None:
    with pytest.raises(StoreError, match="it shows the past"):
        store.at(store.versions()).maintain()


def test_indexes_come_with_size_and_are_kept_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = (
        Index("experiences", "experience_id", "BTREE", 20),
        Index("experiences", "response_text", "INVERTED", 20),
    )
    monkeypatch.setattr(indexes, "INDEXES", wanted)
    monkeypatch.setattr(indexes, "_MANY_NEW_ROWS", 8)
    fill(store, 9)
    store.maintain()
    assert store.dataset("experiences").describe_indices() == []
    fill(store, 9, first=9)
    assert store.maintain()["experiences"].before.new_rows == 36
    known = {i.name: i.num_rows_indexed for i in store.dataset("experiences").describe_indices()}
    assert known == {"experience_id_idx": 36, "response_text_idx": 36}
    fill(store, 4, first=30)
    assert store.maintain(only_due=True)["experiences"].after.new_rows == 0
    fill(store, 1, first=50)
    look = store.maintain(dry_run=True)["experiences"].before
    assert look.new_rows == 2
    plan = store.dataset("experiences").scanner(filter="experience_id = 'e3/1'").explain_plan()
    assert "ScalarIndexQuery" in plan
    for place in (3, 31, 50):
        found = store.dataset("experiences").to_table(filter=f"experience_id = 'e{place}/1'")
        assert found.num_rows == 1


BUSY = """
import sys
import time
from support.builders import experiences
from rlake.store import Experience, connect
from rlake.store.replay import Freshness, Sampler
place, me, what = sys.argv[1:]
store = connect(place)
done = 0
if what == "maintain":
    while not store.count("drops"):
        store.maintain(only_due=done % 2 == 0, grace=1.0)
        done += 1
        time.sleep(0.05)  # as often as a fast trainer
elif what == "append":
    for i in range(80):
        rows = [Experience(**vars(e) | {"experience_id": f"{me}/{i}/{j}", "group_id": f"{me}/{i}",
                "run_id": me}) for j, e in enumerate(experiences(4, reward=1.0))]
        done += store.append("experiences", rows).rows
else:
    sampler = Sampler(store, freshness=Freshness(None))
    step = 0
    while done < 320:
        step += 1
        draw = store.wait_for(
            lambda: sampler.draw(16, step=step, policy_version=0),
            tables=["experiences"], seconds=60, describe=lambda: f"drawn {done}",
        )
        rows = sampler.read(draw, ["experience_id", "response_text"])
        assert rows.height == 16 and not rows["response_text"].has_nulls()
        done += rows.height
print(done)
"""


def test_writers_and_readers_in_other_processes_notice_nothing(store: Store) -> None:
    jobs = [("a", "append"), ("r", "draw"), ("m", "maintain")]
    started = {me: start(BUSY, store.uri, me, what) for me, what in jobs}
    said = {me: started[me].communicate(timeout=100)[0] for me in ("a", "r")}
    store.append("drops", [{"lineage_id": "end", "operator": "end", "reason": "end"}])
    said |= {me: started[me].communicate(timeout=100)[0] for me in ("m",)}
    assert [p.returncode for p in started.values()] == [0] * 3
    assert [int(said[me]) for me in "ar"] == [320, 320]
    assert int(said["m"]) > 1
    ids = store.scan("experiences").select("experience_id").collect()["experience_id"]
    assert (len(ids), ids.n_unique()) == (320, 320)
    store.maintain(grace=0)
    assert len(store.dataset("experiences").get_fragments()) == 1


def test_a_report_is_readable_and_speaks_json(store: Store) -> None:
    fill(store, 3)
    report = store.maintain(grace=0)
    assert "tasks: files 3 -> 1, MB" in str(report)
    told = json.loads(json.dumps(report.as_dict()))
    assert told["tables"]["tasks"]["after"]["fragments"] == 1
    assert isinstance(store.dataset("tasks").to_table(), pa.Table)


@pytest.mark.parametrize("noted", ['{"version":2}', '{"version":900}', "not JSON", None])
def test_the_newest_version_is_found_whatever_is_noted(store: Store, noted: str | None) -> None:
    fill(store, 5)
    assert store.folder is not None
    note = store.folder / "tasks.lance" / "_versions" / "latest_version_hint.json"
    note.unlink()
    if noted is not None:
        note.write_text(noted)
    other = connect(store.uri)
    assert (other.versions()["tasks"], other.count("tasks")) == (6, 5)
    fill(other, 1, first=9)
    assert (store.versions()["tasks"], store.count("tasks")) == (7, 6)


@pytest.mark.parametrize("name", ["a b", "50%20", "x#y?z", "é数", "it's [here]"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    store = connect(tmp_path / name)
    fill(store, 2)
    assert connect(tmp_path / name).count("tasks") == 2
    assert store.maintain(grace=0)["tasks"].after.fragments == 1
    assert store.count("tasks") == 2
