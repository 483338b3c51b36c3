"""The front door: `rlake.train`, `run`, `evaluate` and `Run`, on a real tiny model."""

import asyncio
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.tiny_models import config

import rlake
from rlake.store.errors import ConfigError, NotFoundError

SCRIPT = """
import sys
from support.tiny_models import config
import rlake

def ones(task: rlake.Task, experience: rlake.Experience) -> float:
    return experience.response_text.count("1") / 3

if __name__ == "__main__":
    place, steps, resume = sys.argv[1:]
    small = config()
    rlake.train(
        rlake.connect(place), model=small.model, algorithm=small.algorithm, rewards=ones,
        tasks=small.tasks, steps=int(steps), resume=bool(int(resume)), threads=1,
        explorer={"sampling": {"max_tokens": 3}},
        trainer={"batch_size": 2, "checkpoint_every": 1},
    )
"""


def ones(task: rlake.Task, experience: rlake.Experience) -> float:
    return (experience.response_text or "").count("1") / 3


def trained(lake: rlake.Store, **changes: Any) -> rlake.Run:
    small = config()
    sections: dict[str, Any] = {
        "model": small.model,
        "algorithm": {"grpo": {"group_size": 3}},
        "tasks": small.tasks,
        "steps": 3,
        "threads": 1,
        "explorer": {"sampling": {"max_tokens": 3}},
        "trainer": {"batch_size": 2, "learning_rate": 1e-2},
        "evaluate": {"sampling": {"max_tokens": 3}},
    }
    return rlake.train(lake, **sections | changes)


def test_all_public_names_are_there_and_loaded_when_used() -> None:
    assert {name for name in rlake.__all__ if getattr(rlake, name, None) is None} == set()
    assert rlake.__version__ == "0.1.0"
    assert rlake.algorithms.resolve("grpo").group_size == 8


def test_a_run_trained_with_a_callable_answers_measures_and_goes_on(tmp_path: Path) -> None:
    def lenient(task: rlake.Task, experience: rlake.Experience) -> float:
        return ones(task, experience) + 0.5

    lake = rlake.connect(tmp_path / "lake")
    run = trained(lake, rewards={lenient: 1.0, ones: 0.5})

    assert run == rlake.Run(lake, "run-1")
    assert run.metrics("train/reward_mean", "train/loss").shape == (3, 3)
    assert {"step", "explore/reward_mean", "train/loss"} <= set(run.metrics().columns)
    rows = run.experiences().collect()
    assert rows.height == 3 * 2 * 3
    assert {part["name"] for row in rows["rewards"] for part in row} == {"lenient", "ones"}
    [[functions]] = lake.sql("SELECT functions FROM runs WHERE job = 'explore' LIMIT 1").fetchall()
    assert {"reward:lenient", "reward:ones"} <= {function["name"] for function in functions}

    [answer] = asyncio.run(run.policy(1).generate([{"role": "user", "content": "1+1="}], n=1))
    assert answer.policy_version == 1

    assert rlake.evaluate(lake, run.config, version=0).policy_version == 0
    assert rlake.evaluate(lake, run.config).policy_version == 3

    assert run.resume(trainer={"steps": 5}) == run
    assert run.metrics("train/loss")["step"].to_list() == [1, 2, 3, 4, 5]
    assert trained(lake, rewards=[ones]).run_id == "run-2"


def test_stored_rows_are_trained_on_when_nothing_rewards_new_ones(tmp_path: Path) -> None:
    lake = rlake.connect(tmp_path / "lake")
    trained(lake, rewards=ones)
    run = trained(lake, algorithm="raft", explorer=None, where="reward IS NOT NULL", steps=1)
    assert run.experiences().collect().height == 0
    [(drawn,)] = lake.sql("SELECT count(*) FROM draws WHERE run_id = 'run-2'").fetchall()
    assert drawn > 0


def test_tasks_may_be_a_function_or_a_condition(tmp_path: Path) -> None:
    def sums() -> list[rlake.Task]:
        return [rlake.Task.ask(f"{a}+1=", str(a + 1), taskset="sums") for a in range(4)]

    lake = rlake.connect(tmp_path / "lake")
    run = trained(lake, rewards=ones, tasks=sums, steps=1)
    assert lake.count("tasks") == 4
    lake.append("tasks", [rlake.Task.ask("7+1=", "8", taskset="other")])
    other = trained(lake, rewards=ones, tasks="taskset = 'other'", steps=1)
    prompts = other.experiences().select("prompt_text").unique().collect()
    assert prompts["prompt_text"].to_list() == ["7+1="]
    assert run.experiences().filter(pl.col("prompt_text") == "7+1=").collect().height == 0


def test_a_configuration_is_run_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("extends: grpo_digits\nname: mine\ntrainer: {steps: 1, batch_size: 2}\n")
    lake = rlake.connect(tmp_path / "lake")
    assert rlake.run(lake, path).metrics("train/loss").height == 1


def test_what_does_not_exist_is_named_with_what_does(tmp_path: Path) -> None:
    lake = rlake.connect(tmp_path / "lake")
    with pytest.raises(ConfigError, match="the store has no run to resume; leave `resume` out"):
        trained(lake, rewards=ones, resume=True)
    with pytest.raises(NotFoundError, match="run `run-9` does not exist"):
        rlake.Run(lake, "run-9").resume()
    run = trained(lake, rewards=ones, steps=1)
    with pytest.raises(NotFoundError, match="has no metric `train/los`"):
        run.metrics("train/los")


@pytest.mark.slow
def test_a_script_that_is_interrupted_goes_on_with_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, place = tmp_path / "script.py", tmp_path / "lake"
    script.write_text(SCRIPT)
    lake = rlake.connect(place)

    command = [sys.executable, str(script), str(place), "100000", "0"]
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        lake.wait_for(
            lambda: lake.count("draws") >= 12 or None,
            tables=["draws"],
            seconds=200,
            describe=lambda: "two steps were not drawn",
        )
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "run `run-1` was stopped; continue with the same call and `resume=True`" in printed
    statuses = "SELECT DISTINCT job, status FROM runs WHERE ended_at IS NOT NULL ORDER BY job"
    ended = lake.sql(statuses).fetchall()
    assert ended == [("explore", "interrupted"), ("train", "interrupted")]

    [(newest,)] = lake.sql("SELECT max(step) FROM draws").fetchall()
    # here: another process would take seconds for its imports
    monkeypatch.setattr(sys, "argv", [str(script), str(place), str(newest + 2), "1"])
    runpy.run_path(str(script), run_name="__main__")
    steps = rlake.Run(lake, "run-1").metrics("train/loss")["step"].to_list()
    assert steps == list(range(1, newest + 3))


def test_a_misspelt_parameter_of_train_is_answered_with_the_right_one(store: rlake.Store) -> None:
    with pytest.raises(ConfigError, match="unknown parameter `step` of `train`; did you mean `ste"):
        rlake.train(store, model={"from_scratch": {}}, step=3)
    with pytest.raises(ConfigError, match="unknown key `trainr`; did you mean `trainer`"):
        rlake.train(store, model={"from_scratch": {}}, trainr={})
