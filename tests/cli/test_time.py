"""Time on the command line: snapshots, branches, and `--at` on what reads."""

import json
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from support.builders import experiences, task
from support.commands import Command, last_json, refused

from rlake.store import Store, connect

RUNNING = {
    "run_id": "demo",
    "attempt": 1,
    "job": "train",
    "name": "demo",
    "config": "{}",
    "code_version": "0",
    "status": "running",
    "start_step": 1,
}
PIPELINE = """
name: answered
source: {table: tasks}
operators: [{keep: {where: "length(answer) < 3"}}]
sink: {file: out.jsonl}
"""


def count(rlake: Command, table: str, *options: object) -> int:
    said = rlake("sql", f"SELECT count(*) AS n FROM {table}", "--json", *options)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)[0]["n"]


def test_snapshots_are_taken_listed_compared_and_dropped(rlake: Command, lake: Store) -> None:
    assert "no snapshots yet" in rlake("snapshot", "list").stdout
    made = last_json(rlake("snapshot", "create", "one", "--note", "why", "--json"))
    assert made["tables"]["experiences"] == lake.versions()["experiences"]
    assert "one" in rlake("snapshot", "list").stdout
    lake.append("experiences", experiences(4, run_id="demo"))
    said = rlake("snapshot", "diff", "one").stdout.splitlines()
    assert [line.split() for line in said if line.startswith("experiences ")] == [
        ["experiences", "4", "0", "1", "to", "2"]
    ]
    assert ["demo", "explorer", "4", "0"] in [line.split() for line in said]
    found = last_json(rlake("snapshot", "diff", "one", "now", "--json"))
    assert found["experiences"][0] == {
        "run_id": "demo",
        "source": "explorer",
        "added": 4,
        "removed": 0,
    }
    assert "the same rows at `now` and `now`" in rlake("snapshot", "diff", "now").stdout
    [listed] = last_json(rlake("snapshot", "list", "--json"))["snapshots"]
    assert (listed["name"], listed["note"]) == ("one", "why")
    assert last_json(rlake("snapshot", "drop", "one", "--json"))["dropped"] == "one"
    assert "no snapshot `one`" in refused(rlake("snapshot", "drop", "one"))


def test_everything_that_reads_can_look_at_a_snapshot(
    rlake: Command, lake: Store, tmp_path: Path
) -> None:
    lake.snapshot("one")
    lake.append("tasks", [task(n) for n in range(3, 6)])
    assert (count(rlake, "tasks"), count(rlake, "tasks", "--at", "one")) == (4, 1)
    rows = {
        t["table"]: t["rows"] for t in last_json(rlake("tables", "--json", "--at", "one"))["tables"]
    }
    assert rows["tasks"] == 1
    new = task(4).task_id
    assert rlake("show", new).returncode == 0
    assert "nothing in" in refused(rlake("show", new, "--at", "one"))
    (tmp_path / "answered.yaml").write_text(PIPELINE)
    done = last_json(rlake("pipeline", "run", "answered.yaml", "--at", "one", "--json"))
    assert (done["rows_in"], done["rows_out"]) == (1, 1)
    assert last_json(rlake("pipeline", "run", "answered.yaml", "--json"))["rows_in"] == 4
    assert rlake("pipeline", "explain", "answered.yaml", "--at", "one").returncode == 0
    for words in (
        ("sql", "SELECT 1"),
        ("tables",),
        ("show", new),
        ("pipeline", "run", "answered.yaml"),
        ("pipeline", "explain", "answered.yaml"),
        ("verify", "--run", "demo", "--step", "1"),
    ):
        assert "no snapshot `on`; did you mean `one`?" in refused(rlake(*words, "--at", "on"))


def test_a_store_is_restored_and_the_way_back_is_told(rlake: Command, lake: Store) -> None:
    lake.snapshot("one")
    lake.append("tasks", [task(3)])
    said = rlake("snapshot", "restore", "one")
    assert said.stdout.splitlines() == [
        "restored 1 table to `one`: `tasks` to version 4",
        "undo it with `rlake snapshot restore before-restore-one-1`",
    ]
    assert count(rlake, "tasks") == 1
    done = last_json(rlake("snapshot", "restore", "before-restore-one-1", "--json"))
    assert done["tables"] == {"tasks": 5}
    assert count(rlake, "tasks") == 2


def test_a_live_job_forbids_a_restore_a_killed_one_does_not(rlake: Command, lake: Store) -> None:
    lake.snapshot("one")
    lake.append("job_events", [RUNNING])
    assert lake.runs_folder is not None
    folder = lake.runs_folder / "demo"
    assert "`train` of run `demo` is running, and would" in refused(
        rlake("snapshot", "restore", "one")
    )
    folder.mkdir(parents=True)
    with FileLock(folder / ".train.lock"):
        said = rlake("snapshot", "restore", "one", "--force")
        assert (said.returncode, lake.count("job_events")) == (1, 1)
        assert "`train` of run `demo` is running in another process" in said.stderr
    assert rlake("snapshot", "restore", "one").returncode == 0
    assert lake.count("job_events") == 0


def test_a_branch_is_made_used_listed_merged_and_dropped(rlake: Command, lake: Store) -> None:
    lake.append("experiences", experiences(4))
    assert "no branches; create one" in rlake("branch", "list").stdout
    made = last_json(rlake("branch", "create", "trial", "--json"))
    assert made["store"] == f"{lake.uri}@trial"
    on_trial = ("--store", made["store"])
    trial = connect(made["store"])
    trial.append("tasks", [task(5)])
    verdict = {"scorer": "s", "scorer_version": "1", "value": 1.0}
    trial.append("scores", [verdict | {"experience_id": f"g000/0{n}"} for n in range(3)])
    lake.append("scores", [verdict | {"experience_id": "g000/00", "value": 0.0}])
    assert (count(rlake, "tasks", *on_trial), count(rlake, "tasks")) == (2, 1)
    assert "on branch" not in rlake("snapshot", "create", "mine", *on_trial).stderr
    assert count(rlake, "tasks", *on_trial, "--at", "mine") == 2
    assert "no snapshot `mine`" in refused(rlake("sql", "SELECT 1", "--at", "mine"))
    [listed] = last_json(rlake("branch", "list", "--json"))["branches"]
    assert listed["rows_added"] == {"tasks": 1, "scores": 3, "snapshots": 1}
    assert "tasks +1, scores +3" in rlake("branch", "list").stdout
    merged = last_json(rlake("branch", "merge", "trial", "--json"))["tables"]["scores"]
    assert (merged["rows"], merged["already"], merged["num_conflicts"]) == (2, 0, 1)
    said = rlake("branch", "merge", "trial").stdout.splitlines()
    assert ["scores", "0", "2", "0", "1"] in [line.split() for line in said]
    assert said[-1] == "conflict in scores: g000/00 s 1"
    assert "left on the branch: 1 row of tasks (a branch keeps its own tasks" in "\n".join(said)
    assert "with 5 rows of its own" in rlake("branch", "drop", "trial").stdout
    assert "has no branch `trial`" in refused(rlake("branch", "drop", "trial"))
    assert "has no branch `trial`" in refused(rlake("tables", *on_trial))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("branch", "create", "a b"), "a branch cannot be called 'a b'"),
        (("branch", "create", "trial"), "branch `trial` exists already"),
        (("branch", "create", "new", "--at", "none"), "no snapshot `none`"),
        (("branch", "merge", "trail"), "did you mean `trial`?"),
        (("branch", "drop", "trail"), "did you mean `trial`?"),
        (("snapshot", "create", "a b"), "a snapshot cannot be called 'a b'"),
        (("snapshot", "restore", "none"), "no snapshot `none`"),
        (("snapshot", "diff", "none"), "no snapshot `none`"),
        (("tables", "--store", "lake@trail"), "did you mean `trial`?"),
        (("tables", "--store", "none@trial"), "no store at"),
    ],
)
def test_what_is_wrong_is_one_line(
    rlake: Command, lake: Store, words: tuple[str, ...], error: str
) -> None:
    lake.branch("trial")
    said = refused(rlake(*words))
    assert error in said
    assert len(said.splitlines()) == 1


def test_a_branch_that_is_damaged_hides_no_other_and_can_be_dropped(
    rlake: Command, lake: Store
) -> None:
    lake.branch("broken")
    lake.branch("whole")
    shutil.rmtree("lake/tasks.lance/tree/broken")
    listed = json.loads(rlake("branch", "list", "--json").stdout)["branches"]
    assert {b["name"]: b["rows_added"] for b in listed} == {"broken": None, "whole": {}}
    assert "cannot be read; see `rlake doctor`" in rlake("branch", "list").stdout
    assert "with what was left of its own" in rlake("branch", "drop", "broken", "--force").stdout
    assert [
        b["name"] for b in json.loads(rlake("branch", "list", "--json").stdout)["branches"]
    ] == ["whole"]


def test_nothing_is_undone_where_nothing_was_to_be_restored(rlake: Command, lake: Store) -> None:
    lake.snapshot("here")
    said = rlake("snapshot", "restore", "here")
    assert said.returncode == 0
    assert said.stdout == "nothing to restore: the tables are unchanged since `here`\n"
