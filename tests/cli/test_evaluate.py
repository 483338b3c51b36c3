"""`rlake evaluate`: what it prints, as a table and as JSON, and what it refuses."""

import json
from pathlib import Path

import pytest
import yaml
from support.commands import Command, last_json, refused
from support.tiny_models import config

from rlake.loop.run import run
from rlake.store import Store


@pytest.fixture
def trained(lake: Store, tmp_path: Path) -> str:
    """The file of a run that was trained for three steps."""
    settings = config(evaluate={"sampling": {"temperature": 0, "max_tokens": 3}})
    run(lake, settings)
    tree = settings.model_dump(mode="json", exclude_none=True)
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(tree))
    return "demo.yaml"


@pytest.mark.slow
def test_versions_are_measured_once_and_compared(rlake: Command, trained: str) -> None:
    first = last_json(rlake("evaluate", trained, "--json"))
    assert (first["policy_version"], first["run_id"]) == (3, "demo:eval-001")
    assert [e["name"] for e in first["estimates"]][:3] == ["accuracy", "reward_mean", "pass@1"]
    every = last_json(rlake("evaluate", trained, "--every-checkpoint", "--json"))["evaluations"]
    assert [one["is_from_before"] for one in every] == [False] * (len(every) - 1) + [True]
    shown = rlake("evaluate", trained)
    assert "version 3" in shown.stdout
    assert "demo:eval-001 (before)" in shown.stdout
    compared = rlake("evaluate", trained, "--compare", "3", "3")
    assert "version 3 against version 3, on 5 tasks" in compared.stdout
    assert "p, McNemar's exact test" in compared.stdout
    both = last_json(rlake("evaluate", trained, "--compare", 3, 3, "--json"))
    assert both["comparison"]["p_value"] == 1.0


def test_options_change_how_it_is_measured(rlake: Command, trained: str) -> None:
    found = last_json(
        rlake(
            *("evaluate", trained, "--json", "--k", "1,2", "--where", "answer = '4'"),
            *("--engine", "transformers", "--set", "evaluate.group_size=2"),
        )
    )
    names = [e["name"] for e in found["estimates"]]
    assert names[2:] == ["pass@1", "best@1", "pass@2", "best@2"]
    assert found["num_rows"] == 2 * found["num_tasks"]
    assert found["num_tasks"] == 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--k", "8"], "pass@8 needs 8 rollouts"),
        (["--k", "many"], "evaluate.pass_at"),
        (["--engine", "steam"], "engine `steam` does not exist"),
        (["--version", "77"], "has no weights of version 77"),
        (["--model", "./nowhere"], "loaded: no such folder"),
        (["--version", "0", "--every-checkpoint"], "one of --version, --every-checkpoint"),
        (["--where", "answer = 'none'"], "no task matches"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    rlake: Command, lake: Store, tmp_path: Path, options: list[str], says: str
) -> None:
    tree = config().model_dump(mode="json", exclude_none=True)
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(tree))
    refused(rlake("evaluate", "demo.yaml", *options), says)


def test_a_run_that_is_measured_meanwhile_prints_it_and_is_shown_with_it(
    rlake: Command, lake: Store, tmp_path: Path
) -> None:
    settings = config(evaluate={"every_steps": 2, "sampling": {"max_tokens": 3}})
    tree = settings.model_dump(mode="json", exclude_none=True)
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(tree))
    plan = rlake("run", "demo.yaml", "--dry-run", "--full")
    assert json.loads(plan.stdout)["evaluate"]["every_steps"] == 2
    assert lake.count("job_events") == 0
    done = rlake("run", "demo.yaml")
    assert "demo step 2: accuracy" in done.stderr
    assert "held_out_reward_before" in done.stdout
    refused(rlake("show", "dmo"), "has the id `dmo`; did you mean the run `demo`?")
    shown = json.loads(rlake("show", "demo", "--json").stdout)
    assert [one["policy_version"] for one in shown["measurements"]] == [0, 2, 3]
    rewards = lake.sql(
        "SELECT avg(reward) FROM experiences WHERE purpose = 'eval' GROUP BY batch ORDER BY batch"
    ).fetchall()
    told_of = [one["reward_mean"] for one in shown["measurements"]]
    assert told_of == pytest.approx([reward for (reward,) in rewards])
