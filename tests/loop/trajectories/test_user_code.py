"""Where users' code ends: a try that exits, cancels itself or returns nonsense is a row."""

import asyncio
import sys
from dataclasses import replace
from typing import Any

import pytest
from support.builders import line_of, task
from support.rollouts import rollouts, run_tasks, spec_of

from rlake.loop.inference.policy import Policy
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.trajectories.rewards import RewardPart
from rlake.loop.workflows import single_turn
from rlake.operators.rewards import exact_match
from rlake.store import Experience, Task


async def exits(task: Task, policy: Policy) -> Experience:
    sys.exit("no more games")


async def is_cancelled(task: Task, policy: Policy) -> None:
    lost = asyncio.create_task(asyncio.sleep(60))
    lost.cancel()
    await lost


async def without_rewards(task: Task, policy: Policy) -> Experience:
    return replace(await single_turn(task, policy), rewards=None)  # type: ignore[arg-type]


async def with_a_list(task: Task, policy: Policy) -> Experience:
    return replace(await single_turn(task, policy), metadata=["seen"])  # type: ignore[arg-type]


def one_try(workflow: Any, **rewards: Any) -> Experience:
    named = {name: RewardPart(reward) for name, reward in rewards.items()}
    [row] = rollouts(ScriptedPolicy(["2"], version=3), workflow, task(1), rewards=named)
    return row


@pytest.mark.parametrize(
    ("workflow", "why"),
    [
        (exits, "workflow failed: it called `exit(no more games)`"),
        (is_cancelled, "workflow failed: something that it waits for was cancelled"),
        (without_rewards, "workflow failed: its row's `rewards` is None, expected a mapping"),
        (with_a_list, "its row's `metadata` is ['seen'], expected a mapping or None"),
    ],
)
def test_a_workflow_that_would_end_the_job_becomes_a_row_that_says_why(
    workflow: Any, why: str
) -> None:
    row = one_try(workflow, exact_match=exact_match)
    assert why in str(row.drop_reason)
    assert row.experience_id == "demo/000001/0000/00"


async def cancels(task: Task, row: Experience) -> float:
    raise asyncio.CancelledError


def quits(task: Task, row: Experience) -> float:
    sys.exit(1)


@pytest.mark.parametrize(
    ("reward", "raised", "why"),
    [
        (cancels, "raise asyncio.", "something that it waits for was cancelled"),
        (quits, "sys.exit(1)", "it called `exit(1)`"),
    ],
)
def test_a_reward_that_would_end_the_job_leaves_the_row_without_one(
    reward: Any, raised: str, why: str
) -> None:
    row = one_try(single_turn, judge=reward)
    assert row.reward is None
    assert row.drop_reason == f"reward `judge` failed: {why} {line_of(__file__, raised)}"
    assert row.token_ids


async def waits(task: Task, policy: Policy) -> None:
    await asyncio.Event().wait()


def test_tries_that_are_cancelled_from_outside_are_cancelled() -> None:
    async def cancelled() -> None:
        tries = run_tasks([(0, task(1))], ScriptedPolicy(["2"]), spec_of(waits), batch=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tries, 0.01)

    asyncio.run(cancelled())
