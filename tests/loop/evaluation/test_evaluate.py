"""Measuring a policy: every try is a row, kept apart from training."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from support.endpoints import answering, said
from support.tiny_models import SPEC, config, table, tiny

from rlake.loop.config import RunConfig
from rlake.loop.evaluation.estimates import Estimate
from rlake.loop.evaluation.evaluate import compare, evaluate, evaluate_checkpoints
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


def test_a_notebook_whose_event_loop_is_running_can_measure(store: Store) -> None:
    async def cell() -> float:
        return evaluate(store, measured()).reward_mean

    assert asyncio.run(cell()) == evaluate(store, measured()).reward_mean


def test_one_policy_can_be_measured_in_several_ways(store: Store) -> None:
    first = evaluate(store, measured())
    again = evaluate(store, measured(batch_size=2))
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
    told = {"split": "eval", "model": str(tmp_path / "other")}
    assert set(made.rows()) == {(None, json.dumps(told))}
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
    found = evaluate(store, config(explorer={"rewards": "support.runs:unsure"}))
    rewards = table(store, "experiences", "reward")["reward"]
    assert 0 < found.num_unscored == rewards.null_count() < found.num_rows
    assert found.accuracy == (rewards.drop_nulls() >= 1).mean()


def test_when_nothing_can_be_scored_there_is_no_accuracy(store: Store) -> None:
    with pytest.raises(JobError, match="none of 5 rollouts could be scored"):
        evaluate(store, config(explorer={"rewards": "support.runs:gives_nothing"}))


def test_pass_at_k_is_what_the_stores_own_macro_says_of_the_rows(store: Store) -> None:
    sampled = {"temperature": 1, "max_tokens": 1}
    settings = measured(group_size=4, pass_at=[1, 3], sampling=sampled)
    settings = settings.model_copy(
        update={
            "explorer": settings.explorer
            and settings.explorer.model_copy(update={"rewards": "support.runs:small"})
        }
    )
    found = evaluate(store, settings)
    said = {e.name: e for e in found.estimates}
    assert list(said) == ["accuracy", "reward_mean", "pass@1", "best@1", "pass@3", "best@3"]
    [(expected, tasks)] = store.sql(
        "SELECT avg(pass_at_k(num_scored, num_passed, 3)), count(*) FROM groups "
        f"WHERE run_id = '{found.run_id}'"
    ).fetchall()
    assert 0 < found.accuracy < 1
    assert (said["pass@3"].value, tasks) == (pytest.approx(expected), 5)
    assert said["pass@3"].value == said["best@3"].value > said["pass@1"].value == found.accuracy
    assert bounds(said["pass@3"])[0] <= expected <= bounds(said["pass@3"])[1]
    told = table(store, "metrics WHERE name = 'eval/pass@3'", "value")["value"]
    assert told.to_list() == [pytest.approx(expected)]


def bounds(estimate: Estimate) -> tuple[float, float]:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


def test_more_tries_than_a_group_has_are_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="pass@8 needs 8 rollouts of each task"):
        evaluate(store, measured(pass_at=[1, 8]))


@pytest.mark.slow
def test_every_checkpoint_is_measured_once_unless_something_changed(store: Store) -> None:
    run(store, measured())
    first = evaluate_checkpoints(store, measured())
    versions = [one.policy_version or 0 for one in first]
    assert versions == sorted(set(versions))
    assert versions[-1] == 3
    again = evaluate_checkpoints(store, measured())
    assert [one.run_id for one in again] == [one.run_id for one in first]
    assert all(one.is_from_before for one in again)
    assert [one.estimates for one in again] == [one.estimates for one in first]
    other = evaluate(store, measured(sampling={"temperature": 0, "max_tokens": 2}), rerun=False)
    fewer = evaluate(store, measured(where="split = 'eval' AND answer <> '4'"), rerun=False)
    judged = config(evaluate=measured().evaluate, explorer={"rewards": "exact_match"})
    rejudged = evaluate(store, judged, rerun=False)
    assert [one.is_from_before for one in (other, fewer, rejudged)] == [False] * 3


@pytest.mark.slow
def test_a_version_is_compared_with_another_task_by_task(store: Store, tmp_path: Path) -> None:
    run(store, measured())
    same = compare(store, measured(), 3, 3)
    assert (same.paired.difference, same.paired.p_value, same.b.is_from_before) == (0, 1, True)
    model, tokenizer = tiny(seed=9)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    found = compare(store, measured(), tmp_path / "other", 3)
    assert found.a.model == str(tmp_path / "other")
    assert found.paired.num_tasks == 5
    assert found.paired.difference == pytest.approx(found.b.reward_mean - found.a.reward_mean)
    assert found.paired.mcnemar_p is not None


def test_a_try_of_several_rows_counts_once_by_its_last(store: Store) -> None:
    found = evaluate(store, config(explorer={"workflow": "support.runs:two_steps"}))
    last = table(store, "experiences", "experience_id, reward").filter(
        table(store, "experiences", "experience_id")["experience_id"].str.ends_with(".1")
    )
    assert found.num_rows == 2 * found.num_tasks == 10
    assert found.reward_mean == pytest.approx(last["reward"].mean())


def test_judgements_beside_the_tries_are_not_counted(store: Store) -> None:
    explorer = {
        "workflow": {"self_judging": {"truth": 1.0, "reward": "support.tiny_models:share_of_ones"}}
    }
    found = evaluate(
        store, config(explorer=explorer, model={"from_scratch": {**SPEC, "max_length": 800}})
    )
    assert found.num_rows == 10
    rows = table(store, "experiences", "reward, group_id")
    own = rows.filter(~rows["group_id"].str.contains("judges"))["reward"]
    assert found.reward_mean == pytest.approx(own.mean())


def test_a_model_behind_an_address_can_be_measured_too(store: Store) -> None:
    with answering(said("111")) as server:
        asked = {"endpoint": {"url": server.url, "model": "big"}}
        found = evaluate(store, measured(engine=asked))
    assert (found.model, found.policy_version, found.accuracy) == ("big", None, 1.0)
    rows = table(store, "experiences", "engine, policy_version, metadata, token_ids").rows()
    assert set(rows) == {(server.url, None, json.dumps({"split": "eval", "model": "big"}), None)}
