"""Tasks that a run imports before it starts, and variables of the environment in its file."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import SPEC, table

from rlake.loop.api import Run
from rlake.loop.config import RunConfig, build, load
from rlake.loop.config.env_variables import Written, as_written, filled_in
from rlake.loop.report.plan import plan
from rlake.loop.run import check, run
from rlake.loop.runs.job import same_config, stored_config
from rlake.loop.tasks.prepare import prepare
from rlake.store import Store
from rlake.store.errors import ConfigError, InputError


def tree(tasks: Any, **rest: Any) -> dict[str, Any]:
    return {
        "name": "demo",
        "model": {"from_scratch": SPEC},
        "algorithm": "grpo",
        "tasks": tasks,
        "trainer": {"steps": 1},
        "explorer": {"rewards": "exact_match"},
    } | rest


def lines(path: Path, *sums: tuple[str, str]) -> Path:
    text = "".join(json.dumps({"prompt_text": q, "answer": a}) + "\n" for q, a in sums)
    path.write_text(text)
    return path


def database(path: Path) -> str:
    with sqlite3.connect(path) as one:
        one.execute("CREATE TABLE sums (q TEXT, a TEXT)")
        one.execute("INSERT INTO sums VALUES ('5+5=', '10')")
    one.close()
    return f"sqlite:///{path}"


def test_a_run_imports_its_tasks_once_from_files_patterns_and_databases(
    store: Store, tmp_path: Path
) -> None:
    lines(tmp_path / "a.jsonl", ("1+1=", "2"), ("2+2=", "4"))
    lines(tmp_path / "b.jsonl", ("2+2=", "4"), ("3+3=", "6"))
    path = {"path": [str(tmp_path / "?.jsonl")], "taskset": "sums"}
    run(store, build(tree({"path": path})))
    stored = table(store, "tasks", "prompt_text")["prompt_text"]
    assert sorted(stored) == ["1+1=", "2+2=", "3+3="]
    before = store.versions()["tasks"]
    prepare(store, build(tree({"path": path})))
    assert store.versions()["tasks"] == before, "stored ones are left alone"
    mapped = {
        "path": database(tmp_path / "lab.db"),
        "sql": "SELECT q AS prompt_text, a AS answer FROM input",
        "split": "eval",
    }
    prepare(store, build(tree({"path": mapped})))
    added = table(store, "tasks WHERE split = 'eval'", "prompt_text, taskset").rows()
    assert added == [("5+5=", "sums")]


def test_a_source_that_is_missing_or_invalid_ends_the_run_before_it_starts(
    store: Store, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"`tasks.path`: the file `nowhere/\*.jsonl` does not"):
        check(build(tree({"path": "nowhere/*.jsonl"})))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt_text": "1+1="}\n{oops\n')
    lines(tmp_path / "a.jsonl", ("1+1=", "2"))
    with pytest.raises(InputError, match="line 2 is not JSON"):
        run(store, build(tree({"path": [str(tmp_path / "a.jsonl"), str(bad)]})))
    assert store.count("tasks") == 0
    assert store.count("job_events") == 0


def test_a_variable_is_filled_in_and_never_stored(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = database(tmp_path / "lab.db")
    monkeypatch.setenv("LAB", address.removeprefix("sqlite:///"))
    monkeypatch.setenv("RUN_NAME", "demo")
    monkeypatch.setenv("STEPS", "1")
    path = {"path": "sqlite:///${env:LAB}#sums", "sql": "SELECT q AS prompt_text FROM input"}
    file = tmp_path / "run.yaml"
    given = tree({"path": path}, name="${env:RUN_NAME}")
    file.write_text(json.dumps(given))
    made = load(
        file, ["trainer.steps=${env:STEPS}", "explorer.rewards=support.tiny_models:share_of_ones"]
    )
    assert (made.name, made.trainer.steps) == ("demo", 1)
    assert made.tasks.path is not None
    assert made.tasks.path.path == (f"{address}#sums",)
    run(store, made)
    configs = table(store, "job_events", "config")["config"].to_list()
    assert configs
    for text in configs:
        assert str(tmp_path) not in text
        assert json.loads(text)["tasks"]["path"]["path"] == ["sqlite:///${env:LAB}#sums"]
        assert json.loads(text)["name"] == "demo"
        same_config(text, made)
    assert str(tmp_path) not in plan(made, full=True) + plan(made, full=False)
    Run(store, "demo").resume(trainer={"steps": 2})
    resumed = table(store, "job_events WHERE attempt = 2", "config")["config"].to_list()
    assert resumed
    assert not any(str(tmp_path) in text for text in resumed)
    monkeypatch.delenv("LAB")
    kept = RunConfig.model_validate_json(configs[0])
    assert kept.tasks.path is not None
    assert kept.tasks.path.path == ("sqlite:///${env:LAB}#sums",)
    assert json.loads(stored_config(kept))["tasks"] == json.loads(configs[0])["tasks"]
    with pytest.raises(ConfigError, match="names the environment variable `LAB`, which is"):
        load(file)


def test_a_text_that_equals_a_variable_by_chance_is_stored_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUN_NAME", "sums")
    monkeypatch.setenv("NOTHING", "")
    given = {
        "name": "${env:RUN_NAME}",
        "tasks": {"taskset": "sums"},
        "rewards": "sums",
        "note": "",
        "other": ["${env:NOTHING}"],
    }
    written = Written()
    found = filled_in(given, written, strict=True)
    assert found["name"] == "sums"
    assert as_written(found, written) == given
    assert as_written({**found, "rewards": {"sums": {"path": "sums"}}}, written)["rewards"] == {
        "sums": {"path": "sums"}
    }
    # a section that took over the value of another one
    assert as_written({"copied": "sums"}, written) == {"copied": "${env:RUN_NAME}"}
