"""Several tasksets in one run: each with its own rewards, workflow, sampling and group size."""

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pytest
from support.tiny_models import config, metric, share_of_ones, speaking, table

from rlake.loop.algorithms import resolve
from rlake.loop.config import RunConfig
from rlake.loop.evaluation.evaluate import evaluate
from rlake.loop.inference.policy import Policy, Sampling
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.report.plan import plan
from rlake.loop.rollouts.group import run_group
from rlake.loop.rollouts.setup import RolloutSpecs
from rlake.loop.run import run
from rlake.loop.schedule.units import batch_tasks
from rlake.loop.workflows import single_turn
from rlake.operators.concurrency import run_apart
from rlake.store import Experience, Store, Task
from rlake.store.errors import ConfigError

GENERATED = "support.tiny_models:share_of_ones"
MIXTURE: dict[str, Any] = {
    "sums": {
        "rewards": {GENERATED: {"weight": 2.0, "offset": -1.0}},
        "group_size": 2,
        "sampling": {"max_tokens": 2, "temperature": 0.7},
    },
    "games": {"rewards": "countdown", "workflow": f"{__name__}:shown", "group_size": 5},
}
ROWS = "experiences e JOIN tasks t USING (task_id)"


def both_kinds(*, each: int = 6) -> Iterator[Task]:
    """Yield sums, and games with numbers in their metadata; the first of each is for evaluation."""
    for i in range(each):
        split = "train" if i else "eval"
        yield Task.ask(f"{i}+1=", str(i + 1), taskset="sums", split=split)
        known = {"numbers": [i, 2], "target": i + 2}
        yield Task.ask(f"{i},2={i + 2}", None, taskset="games", split=split, metadata=known)


async def shown(task: Task, policy: Policy) -> Experience:
    """Answer once, and say in the metadata which workflow that was."""
    row = await single_turn(task, policy)
    return row.updated(metadata={"workflow": "shown"})


def mixed(*, tasks: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    given = {"generator": f"{__name__}:both_kinds", "mixture": MIXTURE}
    return config(tasks=given | (tasks or {}), **changes)


def test_a_taskset_has_a_system_prompt_of_its_own_in_prompts_and_rows() -> None:
    mixture = {"sums": {"system_prompt": "12"}, "games": {"workflow": f"{__name__}:shown"}}
    explorer = {"system_prompt": "3", "rewards": "countdown"}
    specs = RolloutSpecs(mixed(tasks={"mixture": mixture}, explorer=explorer))
    policy = speaking(sampling=Sampling(max_tokens=2), max_length=96)
    own = Task(messages=[{"role": "system", "content": "4"}], taskset="sums")

    async def went() -> list[list[Experience]]:
        asked = [*both_kinds(each=1), own]
        made = [await run_group(t, policy, specs.of(t), batch=0, group_index=0) for t in asked]
        await policy.engine.close()
        return made

    rows = asyncio.run(went())
    for group, task, system in zip(rows, [*both_kinds(each=1), own], ["12", "3", "4"], strict=True):
        text = "".join(str(message["content"]) for message in task.messages).replace(",", "")
        for row in group:
            assert row.task_id == task.task_id
            assert row.messages is not None
            assert row.token_ids is not None
            assert row.messages[0] == {"role": "system", "content": system}
            prompt = policy.text(row.token_ids[: row.prompt_length])
            assert prompt == (text if task is own else f"{system}{text}")


def test_each_taskset_of_a_run_has_its_own_rewards_workflow_sampling_and_size(store: Store) -> None:
    run(store, mixed(trainer={"steps": 2, "batch_size": 4}))
    rows = table(store, ROWS, "t.taskset, e.*")
    parts = rows.select("taskset", pl.col("rewards").list.eval(pl.element().struct["name"]))
    assert {(name, *found) for name, found in parts.iter_rows()} == {
        ("sums", "share_of_ones"),
        ("games", "countdown"),
    }
    assert rows["reward"].null_count() == 0
    sizes = rows.group_by("taskset", "group_id").len().select("taskset", "len").unique()
    assert dict(sizes.iter_rows()) == {"sums": 2, "games": 5}
    of_sums, of_games = (rows.filter(taskset=name) for name in ("sums", "games"))
    assert of_sums["temperature"].unique().to_list() == [pytest.approx(0.7)]
    assert of_games["temperature"].unique().to_list() == [1.0]
    assert of_games["metadata"].str.contains('"workflow": "shown"').all()
    assert of_sums["metadata"].null_count() == of_sums.height
    said = (share_of_ones(Task.ask("?"), Experience.from_row(row)) for row in of_sums.to_dicts())
    assert of_sums["reward"].to_list() == pytest.approx([2.0 * share - 1.0 for share in said])
    for name, of in (("sums", of_sums), ("games", of_games)):
        found = metric(store, f"explore/{name}/reward_mean")
        means = {k: v["reward"].mean() for (k,), v in of.group_by("batch")}
        assert found == {k: pytest.approx(v) for k, v in means.items()}


def test_advantages_of_groups_of_different_sizes_are_those_of_the_formula(store: Store) -> None:
    games = {**MIXTURE["games"], "rewards": GENERATED}
    settings = mixed(tasks={"mixture": {**MIXTURE, "games": games}}, trainer={"batch_size": 4})
    run(store, settings)
    drawn = table(
        store,
        "draws_current d JOIN experiences e USING (experience_id)",
        "d.step, d.advantage, e.group_id, e.reward",
    )
    assert set(drawn.group_by("group_id").len()["len"]) == {2, 5}
    for (_, _), group in drawn.group_by("step", "group_id"):
        reward = group["reward"].to_numpy().astype(np.float64)
        apart = reward - reward.mean()
        std = np.sqrt((apart**2).sum() / (len(reward) - 1))
        np.testing.assert_allclose(group["advantage"], apart / (std + 1e-6), rtol=1e-5, atol=1e-6)
    steps = drawn.group_by("step").agg(pl.col("group_id").n_unique())
    assert set(steps["group_id"]) == {4}, "a batch counts groups, whatever their sizes"


def test_where_rows_are_drawn_a_batch_has_enough_tasks_for_them_on_average() -> None:
    one = mixed(algorithm="reinforce", trainer={"batch_size": 14})
    assert batch_tasks(one, resolve("reinforce")) == 4  # of 2 and 5 rollouts, 3.5 on average
    two = mixed(algorithm="grpo", trainer={"batch_size": 14})
    assert batch_tasks(two, resolve("grpo")) == 14


def test_a_run_of_rows_from_groups_of_different_sizes_trains_on_all_that_it_needs(
    store: Store,
) -> None:
    run(store, mixed(algorithm="reinforce", trainer={"steps": 3, "batch_size": 6}))
    assert store.sql(
        "SELECT step, count(*) FROM draws_current GROUP BY 1 ORDER BY 1"
    ).fetchall() == [(1, 6), (2, 6), (3, 6)]


def test_a_timeout_and_retries_are_those_of_the_taskset() -> None:
    mixture = {"sums": {"rollout_timeout": 1.5}, "games": {"max_retries": 3}}
    settings = mixed(tasks={"mixture": mixture}, explorer={"rollout_timeout": 9, "max_retries": 1})
    specs = RolloutSpecs(settings)
    sums, games = (specs.of(Task.ask("?", taskset=name)) for name in ("sums", "games"))
    assert (sums.rollout_timeout, sums.retries) == (1.5, 1)
    assert (games.rollout_timeout, games.retries) == (9.0, 3)
    other = specs.of(Task.ask("?", taskset="other"))
    assert (other.rollout_timeout, other.retries) == (9.0, 1)
    assert sums.timer is not games.timer, "a slow workflow must not set the pace of another"


def test_a_worker_in_another_process_runs_tasks_as_one_in_this() -> None:
    """An actor on Ray has nothing but the pickled configuration."""
    here, there = (RolloutSpecs(c) for c in (mixed(), pickle.loads(pickle.dumps(mixed()))))
    for name in ("sums", "games", "other"):
        one, other = (specs.of(Task.ask("?", taskset=name)) for specs in (here, there))
        assert one.group_size == other.group_size
        assert one.sampling == other.sampling
        assert list(one.rewards) == list(other.rewards)
        assert one.workflow is other.workflow


def test_a_task_with_a_workflow_of_its_own_keeps_it_within_a_taskset() -> None:
    task = Task.ask("2,2=4", taskset="games", workflow="single_turn", metadata={"numbers": [2, 2]})
    specs = RolloutSpecs(mixed())
    rows = run_apart(
        run_group(task, ScriptedPolicy(["2+2"] * 5), specs.of(task), batch=1, group_index=0)
    )
    assert [row.metadata for row in rows] == [None] * 5


EVALUATED = {"where": "split = 'eval'", "sampling": {"max_tokens": 3, "temperature": 0}}


def judged_by(store: Store) -> dict[str, set[str]]:
    """The names of the rewards of evaluated rows, by taskset."""
    found = table(store, f"{ROWS} WHERE e.purpose = 'eval'", "t.taskset, e.rewards, e.metadata")
    return {
        name: {part["name"] for parts in of["rewards"] for part in parts}
        for (name,), of in found.group_by("taskset")
    }


def test_evaluations_judge_each_taskset_by_its_own_rewards(store: Store) -> None:
    settings = mixed(evaluate=EVALUATED | {"every_steps": 1, "at_start": False})
    run(store, settings)
    expected = {"sums": {"share_of_ones"}, "games": {"countdown"}}
    assert judged_by(store) == expected
    evaluate(store, settings)
    assert judged_by(store) == expected


def test_an_evaluation_may_have_rewards_of_its_own(store: Store) -> None:
    tasksets = {"sums": {"rewards": "exact_match"}, "games": {}}
    found = evaluate(store, mixed(evaluate=EVALUATED | {"tasksets": tasksets}))
    assert judged_by(store) == {"sums": {"exact_match"}, "games": {"countdown"}}
    again = mixed(evaluate=EVALUATED | {"rewards": {"exact_match": {"offset": 0.5}}})
    assert evaluate(store, again).run_id != found.run_id


def test_an_evaluation_with_other_rewards_is_another_evaluation(store: Store) -> None:
    run(store, mixed(trainer={"steps": 1, "batch_size": 2}))
    settings = mixed(trainer={"steps": 1, "batch_size": 2}, evaluate=EVALUATED)
    first = evaluate(store, settings)
    assert evaluate(store, settings, rerun=False).run_id == first.run_id
    mixture = {**MIXTURE, "sums": {**MIXTURE["sums"], "rewards": "exact_match"}}
    changed = mixed(
        tasks={"mixture": mixture}, trainer={"steps": 1, "batch_size": 2}, evaluate=EVALUATED
    )
    assert evaluate(store, changed, rerun=False).run_id != first.run_id


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tasks": {"mixture": {"sums": {"rewards": "exact_mach"}}}},
            "`tasks.mixture.sums`: no reward `exact_mach`; did you mean `exact_match`",
        ),
        (
            {"tasks": {"mixture": {"sums": {"workflow": "single_trun"}}}},
            "`tasks.mixture.sums`: no workflow `single_trun`; did you mean `single_turn`",
        ),
        (
            {"evaluate": {"tasksets": {"sums": {"rewards": {"countdwon": 1.0}}}}},
            "`evaluate.tasksets.sums`: no reward `countdwon`; did you mean `countdown`",
        ),
        (
            {"tasks": {"mixture": {"smus": {"rewards": "exact_match"}}}},
            "names the taskset `smus`.*did you mean `sums`",
        ),
        (
            {"tasks": {"mixture": {"sums": {"group_size": 1}}}},
            "set `tasks.mixture.sums.group_size` above 1",
        ),
        (
            {"tasks": {"mixture": {"sums": {"sampling": {"temperature": 0}}}}},
            "`tasks.mixture.sums.sampling.temperature` is 0",
        ),
    ],
    ids=str,
)
def test_a_wrong_name_fails_before_anything_is_recorded(
    store: Store, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(store, mixed(**changes))
    assert store.count("job_events") == 0


def test_a_dry_run_prints_what_applies_to_each_taskset() -> None:
    told = plan(mixed(explorer={"rewards": "boxed"}), full=False)
    assert "a step trains on 2 groups of 2 to 5 rollouts: 4 to 10 rows" in told
    assert "of a batch, 50% are tasks of `sums`: rollouts are made by `single_turn`" in told
    assert f"`{__name__}:shown` and rewarded by `countdown`" in told
    assert "5 rollouts of a task, each response of at most 3 tokens at temperature 1;" in told
    assert "2 rollouts of a task, each response of at most 2 tokens at temperature 0.7;" in told
    follows = told.partition("# From this follows")[2]
    assert "`boxed`" not in follows, "no task is rewarded by it"
