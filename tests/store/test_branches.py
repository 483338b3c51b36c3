"""Branches: the store goes two ways, shares what was before, and what was found out comes back."""

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from support.builders import experiences, task
from support.table_rows import event

from rlake.store import Store, branches, connect, snapshots
from rlake.store.errors import ConflictError, NotAStoreError, NotFoundError, QueryError, StoreError
from rlake.store.merge_branch import MERGED, Merged, left_behind, merge
from rlake.store.replay import Sampler
from rlake.store.schema import TABLES
from rlake.store.snapshots import restore


def score(experience_id: str, value: float, *, version: str = "1") -> dict[str, Any]:
    row = {"experience_id": experience_id, "scorer": "strict", "scorer_version": version}
    return {**row, "value": value}


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def ids(store: Store) -> list[str]:
    return sorted(store.scan("experiences").collect()["experience_id"])


@pytest.fixture
def lake(store: Store) -> Store:
    """Return a store with two tasks, and eight experiences in two commits."""
    store.append("tasks", [task(0), task(1)])
    made = experiences(8, reward=[1.0, 0.0])
    for half in (made[:4], made[4:]):
        store.append("experiences", half)
    return store


# two ways


def test_a_branch_and_the_store_do_not_see_each_others_rows(lake: Store) -> None:
    trial = lake.branch("trial")
    assert (trial.uri, trial.branch_name) == (f"{lake.uri}@trial", "trial")
    lake.append("tasks", [task(7)])
    trial.append("tasks", [task(8), task(9)])
    assert (lake.count("tasks"), trial.count("tasks")) == (3, 4)
    again = connect(trial.uri)
    joined = "SELECT count(*) FROM tasks JOIN experiences USING (task_id)"
    assert again.sql(joined).fetchall() == [(8,)]
    assert again.append("tasks", [task(8), task(10)]).rows == 1, "ids are those of the branch"
    assert again.append("experiences", experiences(8, reward=[1.0, 0.0])).duplicates == 8
    assert connect(lake.uri).count("tasks") == 3


def test_draws_on_a_branch_are_of_its_rows(lake: Store) -> None:
    trial = lake.branch("trial")
    trial.append("experiences", experiences(12, reward=[1.0, 0.0])[8:])
    draw = Sampler(trial, grouped=True).draw(3, step=1, policy_version=0)
    assert draw is not None
    read = Sampler(trial, grouped=True).read(draw, ["experience_id"])
    assert sorted(read["experience_id"]) == ids(trial)
    assert Sampler(lake, grouped=True).draw(3, step=1, policy_version=0) is None


def test_a_branch_costs_almost_no_bytes_and_survives_a_move(lake: Store, tmp_path: Path) -> None:
    assert lake.folder is not None
    tokens = np.random.default_rng(0).integers(0, 50_000, (2000, 200)).tolist()
    made = [e.row() | {"num_tokens": None} for e in experiences(2008)[8:]]
    rows = [row | {"token_ids": ids} for row, ids in zip(made, tokens, strict=True)]
    lake.append("experiences", pl.DataFrame(rows, infer_schema_length=None).to_dicts())
    before = size(lake.folder)
    lake.branch("trial").append("tasks", [task(5)])
    assert size(lake.folder) - before < 50_000 < 900_000 < before


def test_a_store_that_is_copied_or_moved_takes_its_branches_along(
    lake: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert lake.folder is not None
    lake.maintain()
    trial = lake.branch("trial")
    trial.append("experiences", experiences(12, reward=[1.0, 0.0])[8:])
    child = trial.branch("child")
    child.append("tasks", [task(5)])
    child.dataset("experiences").delete("experience_id = 'g001/02'")
    wanted = child.scan("experiences").collect().sort("experience_id")
    shutil.copytree(lake.folder, tmp_path / "copy")
    copied = connect(tmp_path / "copy@child")
    shutil.move(lake.folder, tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    for place, moves in (("copy", 0), ("moved", 1), ("moved", 0), ("link", 0)):
        caplog.clear()
        there = connect(tmp_path / f"{place}@child")
        assert ("was moved here" in caplog.text) == bool(moves)
        assert there.scan("experiences").collect().sort("experience_id").equals(wanted)
        assert there.scan("tasks").filter(pl.col("answer") == "10").collect().height == 1
    there = connect(tmp_path / "moved@child")
    assert there.append("experiences", experiences(16, reward=[1.0, 0.0])).rows == 5
    there.maintain()
    assert (len(ids(there)), len(ids(copied))) == (16, 11)
    assert there.sql("SELECT count(*) FROM experiences WHERE group_id = 'g001'").fetchall() == [
        (4,)
    ]
    assert len(ids(connect(tmp_path / "moved@trial"))) == 12


def test_a_branch_and_the_store_share_their_past(lake: Store) -> None:
    versions = lake.versions()
    lake.snapshot("before")
    lake.append("tasks", [task(7)])
    trial = lake.branch("trial")
    trial.append("tasks", [task(8)])
    trial.snapshot("mine")
    trial.append("tasks", [task(9)])
    lake.snapshot("after")
    assert [trial.at(name).count("tasks") for name in ("before", "mine")] == [2, 4]
    assert trial.at(versions).count("experiences") == 8
    assert trial.at({"tasks": versions["tasks"] - 1}).count("tasks") == 0
    with pytest.raises(NotFoundError, match=r"`after` on branch `trial`: it was taken of .* after"):
        trial.at("after")
    with pytest.raises(NotFoundError, match="no snapshot `mine`; known are `after`, `before`"):
        lake.at("mine")
    with pytest.raises(NotFoundError, match="no snapshot `mime` on branch `trial`; did you mean"):
        trial.at("mime")


def test_a_branch_can_leave_from_a_snapshot_and_from_a_branch(lake: Store) -> None:
    lake.snapshot("before")
    lake.append("tasks", [task(7)])
    old = lake.branch("old", at="before")
    assert old.count("tasks") == 2
    old.append("tasks", [task(8)])
    old.snapshot("mine")
    child = old.branch("child")
    child.append("tasks", [task(9)])
    assert (child.count("tasks"), child.at("mine").count("tasks")) == (4, 3)
    assert child.at({"tasks": 1}).count("tasks") == 0
    assert old.branch("again", at="mine").count("tasks") == 3
    found = branches.current(lake)
    assert {name: b.parent for name, b in found.items()} == {
        "old": None,
        "child": "old",
        "again": "old",
    }
    assert branches.rows_added(lake, found["child"])["tasks"] == 1
    lake.snapshot("later")
    trial = lake.branch("trial")
    with pytest.raises(QueryError, match="older than branch `trial`; make the branch from"):
        trial.branch("no", at="before")
    with pytest.raises(NotFoundError, match="has no branch `no`"):
        connect(f"{lake.uri}@no")


def test_a_branch_goes_back_to_its_own_snapshots_only(lake: Store) -> None:
    lake.snapshot("before")
    lake.append("tasks", [task(6)])
    trial = lake.branch("trial")
    trial.snapshot("start")
    trial.append("tasks", [task(8)])
    with pytest.raises(QueryError, match="`before` is older than branch `trial`, which cannot go"):
        restore(trial, "before")
    lake.append("tasks", [task(7)])
    undo = restore(trial, "start").undo
    assert (trial.count("tasks"), lake.count("tasks")) == (3, 4)
    restore(trial, undo)
    assert (trial.count("tasks"), lake.count("tasks")) == (4, 4)


def test_maintenance_and_clean_up_of_one_leave_the_other_whole(lake: Store) -> None:
    lake.snapshot("before")
    trial = lake.branch("trial")
    trial.append("experiences", experiences(12)[8:])
    trial.snapshot("mine")
    before = (ids(lake), ids(trial))
    for store in (lake, trial, lake, trial):
        store.maintain(grace=0)
        for name in TABLES:
            connect(store.uri).dataset(name).cleanup_old_versions(
                older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
            )
        assert (ids(connect(lake.uri)), ids(connect(trial.uri))) == before
        assert ids(trial.at("before")) == before[0]
        assert ids(trial.at("mine")) == before[1]


# names and addresses


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("s3://bucket/lake@exp", ("s3://bucket/lake", "exp")),
        ("s3://me@bucket/lake", ("s3://me@bucket/lake", None)),
        ("/data/me@home/lake", ("/data/me@home/lake", None)),
        ("/data/a@b@c", ("/data/a@b", "c")),
        ("/data/@scope", ("/data/@scope", None)),
    ],
)
def test_the_text_after_the_last_at_of_an_address_names_a_branch(
    address: str, parts: tuple[str, str | None]
) -> None:
    assert branches.split(address) == parts


def test_a_folder_of_that_very_name_is_no_branch(tmp_path: Path, empty_store: Path) -> None:
    shutil.copytree(empty_store, tmp_path / "lake@home")
    assert connect(tmp_path / "lake@home").branch_name is None
    with pytest.raises(NotAStoreError, match=r"no store at `.*/lake`"):
        connect(tmp_path / "lake@work")
    assert [p.name for p in tmp_path.iterdir()] == ["lake@home"]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "é", "a.b", "-a", "main", "a@b", "a" * 65])
def test_a_branch_has_a_plain_name(store: Store, name: str) -> None:
    with pytest.raises(QueryError, match="a branch cannot be called"):
        store.branch(name)
    assert branches.current(store) == {}


def test_what_is_not_there_is_named_with_the_nearest(lake: Store) -> None:
    lake.branch("trial")
    with pytest.raises(QueryError, match="branch `trial` exists already"):
        lake.branch("trial")
    for use in (
        lambda: connect(f"{lake.uri}@trail"),
        lambda: branches.drop(lake, "trail"),
        lambda: merge(lake, "trail"),
    ):
        with pytest.raises(NotFoundError, match="has no branch `trail`; did you mean `trial`"):
            use()
    with pytest.raises(NotFoundError, match="no snapshot `none`"):
        lake.branch("other", at="none")


# killed half-way

KILLED = """
import os, sys
import lance, rlake
from lance.dataset import Branches
from rlake.store import branches
left, what, name = int(sys.argv[2]), sys.argv[3], sys.argv[4]
owner = lance.LanceDataset if what == "create_branch" else Branches
whole = getattr(owner, what)
def dying(self, *rest):
    global left
    if not left:
        os.kill(os.getpid(), 9)
    left -= 1
    return whole(self, *rest)
setattr(owner, what, dying)
store = rlake.connect(sys.argv[1])
store.branch(name) if what == "create_branch" else branches.drop(store, name)
"""


def killed(store: Store, what: str, name: str, *, after: int) -> None:
    """Make or drop a branch in another process, which is killed after so many tables."""
    args = [sys.executable, "-W", "ignore", "-c", KILLED, store.uri, str(after), what, name]
    assert subprocess.run(args, check=False, timeout=100, env=os.environ).returncode == -9


def test_a_branch_that_was_killed_half_way_is_not_there_and_can_be_made_again(lake: Store) -> None:
    killed(lake, "create_branch", "trial", after=4)
    assert branches.current(lake) == {}
    with pytest.raises(NotFoundError, match="has no branch `trial`"):
        connect(f"{lake.uri}@trial")
    lake.append("tasks", [task(5)])
    # as if it was killed between the files of the branch and Lance's knowing of it
    assert lake.folder is not None
    [one, *_] = lake.folder.glob("*.lance/_refs/branches/trial.json")
    one.unlink()
    trial = lake.branch("trial")
    assert (trial.count("tasks"), ids(trial)) == (3, ids(lake))
    assert trial.append("tasks", [task(6)]).rows == 1
    assert set(branches.find(lake, "trial").versions) == set(TABLES)


def test_a_drop_that_was_killed_half_way_is_completed_by_dropping_again(lake: Store) -> None:
    lake.branch("trial").append("tasks", [task(6)])
    killed(lake, "delete", "trial", after=3)
    assert branches.current(lake) == {}
    branches.drop(lake, "trial")
    assert not any(lake.dataset(name).branches.list() for name in TABLES)
    assert not any(lake.dataset(name).tags.list() for name in TABLES)
    assert lake.branch("trial").count("tasks") == 2


# dropping


def test_a_dropped_branch_leaves_nothing_and_its_name_can_be_given_again(lake: Store) -> None:
    trial = lake.branch("trial")
    trial.append("tasks", [task(6)])
    trial.snapshot("mine")
    assert trial.runs_folder is not None
    trial.runs_folder.mkdir()
    assert trial.runs_folder.name == "runs@trial"
    branches.drop(lake, "trial")
    assert not trial.runs_folder.exists()
    assert not any(lake.dataset(name).tags.list() for name in TABLES)
    with pytest.raises(StoreError, match="cannot open table `tasks`"):
        connect(lake.uri).on_branch("trial").count("tasks")
    again = lake.branch("trial")
    again.append("tasks", [task(9), task(10)])
    assert again.count("tasks") == 4
    assert list(snapshots.current(again)) == []


def test_a_branch_that_others_left_from_or_a_run_works_on_is_kept(lake: Store) -> None:
    trial = lake.branch("trial")
    trial.branch("child")
    with pytest.raises(QueryError, match="`trial` has branches of its own: child; drop them first"):
        branches.drop(lake, "trial", force=True)
    branches.drop(lake, "child")
    trial.append("job_events", [event(run_id="demo")])
    with pytest.raises(QueryError, match="`train` of run `demo` on branch `trial` is not done"):
        branches.drop(lake, "trial")
    branches.drop(lake, "trial", force=True)
    assert branches.current(lake) == {}


def test_a_snapshot_that_a_branch_shares_is_dropped_only_by_force(lake: Store) -> None:
    lake.snapshot("before")
    trial = lake.branch("trial")
    with pytest.raises(QueryError, match="`before` is also one of branch `trial`, which shares"):
        snapshots.drop(lake, "before")
    snapshots.drop(trial, "before")
    assert "snapshot-before" in lake.dataset("tasks").tags.list(), "it is the store's"
    snapshots.drop(lake, "before")
    assert list(snapshots.current(lake)) == []


# coming back


def test_what_a_branch_found_out_is_merged_once_and_its_own_experiences_stay(lake: Store) -> None:
    lake.append("scores", [score("g000/00", 1.0)])
    trial = lake.branch("trial")
    trial.append("experiences", experiences(12)[8:])
    trial.append("scores", [score("g000/01", 0.5), score("g002/00", 0.1), score("g000/02", 0.2)])
    trial.append(
        "experience_values", [{"experience_id": "g000/00", "name": "priority", "version": "1"}]
    )
    trial.append(
        "embeddings", [{"experience_id": "g000/00", "embedder": "e", "vector": [0.5, 0.25]}]
    )
    pair = {"task_id": "t", "chosen_id": "g000/00", "source": "s"}
    trial.append(
        "preferences",
        [
            pair | {"preference_id": "p", "rejected_id": "g000/01"},
            pair | {"preference_id": "q", "rejected_id": "g002/01"},
        ],
    )
    trial.append("drops", [{"lineage_id": "l", "operator": "o", "reason": "r", "task_id": "t"}])
    lake.append("scores", [score("g000/02", 0.2)])
    expected = {
        "scores": Merged(rows=1, already=1, left_out=1),
        "experience_values": Merged(rows=1),
        "embeddings": Merged(rows=1),
        "preferences": Merged(rows=1, left_out=1),
        "drops": Merged(rows=1),
    }
    assert merge(lake, "trial") == {name: expected.get(name, Merged()) for name in MERGED}
    assert len(ids(lake)) == 8
    assert lake.count("scores") == 3
    [made] = lake.scan("embeddings").collect()["vector"].to_list()
    assert made == [0.5, 0.25]
    again = merge(lake, "trial")
    assert left_behind(lake, "trial", again) == {
        "experiences": {"a branch keeps its own experiences": 4},
        "scores": {"of experiences that the store does not have": 1},
        "preferences": {"of experiences that the store does not have": 1},
    }
    assert {name: (m.rows, m.left_out) for name, m in again.items() if m.rows or m.left_out} == {
        "scores": (0, 1),
        "preferences": (0, 1),
    }
    lake.append("experiences", experiences(12)[8:])
    assert {name: m.rows for name, m in merge(lake, "trial").items() if m.rows} == {
        "scores": 1,
        "preferences": 1,
    }


def test_a_merge_names_conflicts_and_keeps_the_stores_rows(lake: Store) -> None:
    trial = lake.branch("trial")
    mine = [score(e, 0.5) for e in ids(lake)]
    trial.append("scores", mine)
    lake.append("scores", [score(e, 0.25) for e in ids(lake)[:6]])
    merged = merge(lake, "trial")["scores"]
    assert (merged.rows, merged.already, merged.num_conflicts) == (2, 0, 6)
    assert merged.conflicts[0] == "g000/00 strict 1"
    assert len(merged.conflicts) == 5
    assert lake.scan("scores").collect()["value"].to_list() == [0.25] * 6 + [0.5] * 2
    with pytest.raises(ConflictError):
        lake.append("scores", mine)


def test_a_branch_is_merged_only_into_the_line_it_left_and_not_into_the_past(lake: Store) -> None:
    trial = lake.branch("trial")
    child = trial.branch("child")
    child.append("scores", [score("g000/00", 1.0)])
    for into in (lake, child):
        with pytest.raises(QueryError, match=r"`child` left from `.*@trial`, and is merged into"):
            merge(into, "child")
    lake.snapshot("now-ish")
    with pytest.raises(StoreError, match="it shows the past"):
        merge(lake.at("now-ish"), "trial")
    assert merge(trial, "child")["scores"].rows == 1
    assert merge(lake, "trial")["scores"].rows == 1
    assert lake.count("scores") == 1


@pytest.mark.parametrize("name", ["my store", "größe", "a#b", "50%20"])
def test_a_store_in_an_odd_path_leaves_nothing_beside_it(tmp_path: Path, name: str) -> None:
    lake = connect(tmp_path / name)
    lake.append("tasks", [task(1)])
    lake.snapshot("before")
    trial = lake.branch("trial")
    trial.append("tasks", [task(2)])
    assert connect(f"{tmp_path / name}@trial").count("tasks") == 2
    assert lake.at("before").count("tasks") == lake.count("tasks") == 1
    branches.drop(lake, "trial")
    snapshots.drop(lake, "before")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_store_whose_path_is_taken_for_a_url_has_no_branches(tmp_path: Path) -> None:
    lake = connect(tmp_path / "what?")
    with pytest.raises(QueryError, match="move the store to a path without one"):
        lake.branch("trial")
    assert [p.name for p in tmp_path.iterdir()] == ["what?"]
