"""What people see of care and of finding: maintain, doctor, retention, search, similar, embed."""

import json
from pathlib import Path

import pytest
from filelock import FileLock
from support.builders import experiences
from support.commands import Command, last_json

from rlake.store import Store


@pytest.fixture
def tried(lake: Store) -> Store:
    """The store that commands use, with eight tries in eight files."""
    for one in experiences(8, reward=(1.0, 0.0)):
        lake.append("experiences", [one])
    return lake


def test_maintain_prints_before_and_after(rlake: Command, tried: Store) -> None:
    said = rlake("maintain", "--dry-run")
    assert "this would be done in" in said.stdout
    assert len(tried.dataset("experiences").get_fragments()) == 8
    said = rlake("maintain", "--grace", "0")
    lines = [line.split() for line in said.stdout.splitlines()]
    assert lines[0][:7] == ["table", "files", "after", "MB", "after", "versions", "after"]
    [row] = [line for line in lines if line[0] == "experiences"]
    assert row[1:3] == ["8", "1"]
    assert (row[5], row[6]) == ("9", "2")
    told = last_json(rlake("maintain", "--json"))["tables"]["experiences"]
    assert told["before"]["fragments"] == told["after"]["fragments"] == 1
    assert told["after"]["query_ms"] > 0


def test_maintain_says_who_is_at_it_and_that_is_no_failure(rlake: Command, tried: Store) -> None:
    rlake("maintain")
    assert tried.folder is not None
    with FileLock(tried.folder / ".locks" / "maintain.lock"):
        said = rlake("maintain")
        assert said.returncode == 0
        assert "nothing done: process" in said.stdout
        assert "nothing" not in last_json(rlake("maintain", "--json"))["busy"]


def test_the_doctor_exits_with_1_when_something_is_wrong(rlake: Command, tried: Store) -> None:
    said = rlake("doctor")
    assert said.returncode == 0
    assert "`experiences`: 8 rows in 8 files" in said.stdout
    assert "code under test is confined here by " in said.stdout
    assert {f["level"] for f in last_json(rlake("doctor", "--json"))["findings"]} >= {"ok"}
    assert tried.folder is not None
    lost = min((tried.folder / "experiences.lance" / "data").iterdir())
    lost.unlink()
    said = rlake("doctor")
    assert said.returncode == 1
    assert lost.name in said.stdout
    assert "-> put the file back" in said.stdout
    assert rlake("doctor", "--json").returncode == 1


def test_the_doctor_tells_a_killed_run_from_one_that_runs(rlake: Command, tried: Store) -> None:
    row = {"run_id": "r", "attempt": 1, "job": "train", "name": "r", "config": "{}"}
    more = {"code_version": "0", "start_step": 1, "status": "running"}
    tried.append("job_events", [row | more])
    assert tried.runs_folder is not None
    lock = FileLock(tried.runs_folder / "r" / ".train.lock")
    (tried.runs_folder / "r").mkdir(parents=True)
    with lock:
        assert "ok       `train` of run `r` is running" in rlake("doctor").stdout
    said = rlake("doctor").stdout
    assert "warning  `train` of run `r` is on record as running, and no process is it" in said
    assert "-> go on with `--resume`" in said


def test_rules_are_added_listed_applied_and_dropped(rlake: Command, tried: Store) -> None:
    assert "no rules; add one" in rlake("retention", "list").stdout
    rule = ("--table", "experiences", "--where", "reward < 1")
    assert "added rule `failures`" in rlake("retention", "add", "failures", *rule).stdout
    assert "reward < 1" in rlake("retention", "list").stdout
    assert "rule `failures`: 4 rows of `experiences`" in rlake("maintain", "--dry-run").stdout
    assert tried.count("experiences") == 8
    rlake("maintain")
    assert tried.count("experiences") == 4
    [listed] = last_json(rlake("retention", "list", "--json"))["rules"]
    assert (listed["name"], listed["experiences_listed"]) == ("failures", 4)
    assert rlake("retention", "drop", "failures").returncode == 0
    said = rlake("retention", "drop", "failures")
    assert (said.returncode, "no retention rule is called `failures`" in said.stderr) == (2, True)
    said = rlake("retention", "add", "x", "--table", "experiences", "--where", "rewrad < 1")
    assert (said.returncode, "did you mean `reward`" in said.stderr) == (2, True)


def test_experiences_are_found_by_words_and_by_likeness(rlake: Command, tried: Store) -> None:
    assert "no idea" in rlake("search", "idea", "-k", "2").stdout
    found = last_json(rlake("search", "idea", "--where", "rollout_index = 3", "--json"))["found"]
    assert [row["experience_id"] for row in found] == ["g000/03", "g001/03"]
    assert "nothing found" in rlake("search", "quaternion").stdout
    said = rlake("similar", "g000/01")
    assert (said.returncode, "`rlake embed`" in said.stderr) == (2, True)
    assert "embedded 8 responses, 0 before" in rlake("embed").stdout
    assert last_json(rlake("embed", "--json"))["already"] == 8
    found = last_json(rlake("similar", "g000/01", "-k", "3", "--json"))["found"]
    assert [row["response_text"] for row in found] == ["no idea"] * 3
    assert "no idea" in rlake("similar", "g000/01").stdout
    said = rlake("similar", "g000/0")
    assert (said.returncode, "did you mean `g000/0" in said.stderr) == (2, True)


def test_doctor_estimates_a_configuration(rlake: Command, tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    path.write_text(json.dumps({"name": "demo", "model": {"from_scratch": {"hidden_size": 64}}}))
    said = rlake("doctor", str(path), "--set", "algorithm=sft")
    assert "weights in float32" in said.stdout
    told = json.loads(rlake("doctor", str(path), "--set", "algorithm=sft", "--json").stdout)
    assert told["problems"] == []
    assert {part["name"]: part["kind"] for part in told["parts"]}["gradients"] == "certain"
    full = ["--set", "trainer.micro_batch_tokens=1073741824", "--set", "algorithm=sft"]
    said = rlake("doctor", str(path), *full)
    assert said.returncode == 1
    assert "change trainer.gradient_checkpointing" in said.stdout
    plan = rlake("run", str(path), "--dry-run", "--set", "algorithm=sft").stdout
    assert "`rlake doctor CONFIG` estimates its memory" in plan
