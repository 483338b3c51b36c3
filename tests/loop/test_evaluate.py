"""Measuring a policy: every try is a row, kept apart from training."""

import json
from pathlib import Path

import pytest
import torch
from tiny import config, table, tiny

from rlake.loop.config import RunConfig
from rlake.loop.evaluate import evaluate
from rlake.loop.run import run
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError


def measured(**evaluation: object) -> RunConfig:
    """A run whose reward is the share of ones, measured greedily on five tasks."""
    settings = {"sampling": {"temperature": 0, "max_tokens": 3}, **evaluation}
    return config(evaluate=settings)


def test_what_is_said_is_what_the_rows_say(store: Store) -> None:
    found = evaluate(store, measured(group_size=3, sampling={"temperature": 1, "max_tokens": 3}))
    rows = table(store, "experiences")
    assert (found.num_tasks, found.num_rows, rows.height) == (5, 15, 15)
    assert set(rows["run_id"]) == {found.run_id}
    assert found.reward_mean == pytest.approx(rows["reward"].mean())
    assert found.accuracy == (rows["reward"] >= 1).mean()
    assert set(rows["group_id"].value_counts()["count"]) == {3}
    tasks = dict(table(store, "tasks", "task_id, split").rows())
    assert {tasks[t] for t in rows["task_id"]} == {"eval"}
    metrics = table(store, "metrics", "job, step, name, value").rows()
    assert ("evaluate", 0, "eval/reward_mean", found.reward_mean) in metrics


def test_one_policy_can_be_measured_in_several_ways(store: Store) -> None:
    first = evaluate(store, measured())
    again = evaluate(store, measured(batch_tasks=2))
    other = evaluate(store, measured(sampling={"temperature": 0, "max_tokens": 1}))
    assert (again.accuracy, again.reward_mean) == (first.accuracy, first.reward_mean)
    assert len({first.run_id, again.run_id, other.run_id}) == 3
    assert store.count("experiences") == 15


def test_each_version_and_any_model_folder_can_be_measured(store: Store, tmp_path: Path) -> None:
    run(store, measured())
    assert evaluate(store, measured()).policy_version == 3
    model, tokenizer = tiny(seed=9)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    before = torch.get_rng_state()
    other = evaluate(store, measured(), model=tmp_path / "other")
    assert torch.equal(before, torch.get_rng_state())
    assert other.policy_version is None
    made = table(store, f"experiences WHERE run_id = '{other.run_id}'", "policy_version, metadata")
    assert set(made.rows()) == {(None, json.dumps({"model": str(tmp_path / "other")}))}
    newest = evaluate(store, measured(), version=3)
    tokens = {
        name: table(store, f"experiences WHERE run_id = '{name}' ORDER BY group_id", "token_ids")
        for name in (other.run_id, newest.run_id)
    }
    assert not tokens[other.run_id].equals(tokens[newest.run_id])
    with pytest.raises(ConfigError, match="run `demo` has no weights of version 7; there are"):
        evaluate(store, measured(), version=7)


def test_a_run_goes_on_after_it_was_measured_and_draws_none_of_those_rows(store: Store) -> None:
    evaluate(store, measured())
    run(store, measured())
    evaluate(store, measured())
    run(store, config(trainer={"steps": 5}, evaluate={"group_size": 2}), resume=True)
    drawn = table(store, "draws_current", "experience_id")["experience_id"]
    assert len(drawn) == 30
    assert not drawn.str.contains("eval").any()


def test_without_tasks_to_measure_on_it_says_so(store: Store) -> None:
    with pytest.raises(ConfigError, match="no task matches `split = 'nowhere'`"):
        evaluate(store, measured(where="split = 'nowhere'"))


def test_a_try_that_cannot_be_scored_counts_neither_as_right_nor_as_wrong(store: Store) -> None:
    found = evaluate(store, config(explorer={"rewards": "loop_parts:unsure"}))
    rewards = table(store, "experiences", "reward")["reward"]
    assert 0 < found.num_unscored == rewards.null_count() < found.num_rows
    assert found.accuracy == (rewards.drop_nulls() >= 1).mean()


def test_when_nothing_can_be_scored_there_is_no_accuracy(store: Store) -> None:
    with pytest.raises(JobError, match="none of 5 tries could be scored"):
        evaluate(store, config(explorer={"rewards": "loop_parts:gives_nothing"}))
