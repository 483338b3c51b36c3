"""Groups that are sampled in one request have the rows that rollouts one by one have."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.builders import task
from support.rollouts import run_tasks, spec_of
from support.tiny_models import speaking

from rlake.loop.inference.cancellation import CancelScope, cancel_scope
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Completion, Sampling
from rlake.loop.rollouts.timeouts import RolloutTimer
from rlake.loop.trajectories.rewards import RewardPart, Rewards
from rlake.loop.workflows.single_turn import single_turn
from rlake.store import Experience, Task
from rlake.store.records import Message

ENDLESS = Sampling(max_tokens=20_000, ignore_eos=True)


def rows_of(policy: ChatPolicy, *, one_by_one: bool = False, **how: Any) -> list[dict[str, Any]]:
    """Return the rows of two groups, without their times; slots make rollouts run one by one."""
    spec = spec_of(single_turn, **{"group_size": 3, "rewards": "exact_match"} | how)

    async def made() -> list[Experience]:
        slots = asyncio.Semaphore(100) if one_by_one else None
        tasks = [(0, task(1)), (1, task(2))]
        return await run_tasks(tasks, policy, replace(spec, slots=slots), batch=3)

    return [row.row() | {"timings": None} for row in asyncio.run(made())]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"greedy_rollouts": 1},
        {"purpose": "eval", "group_size": 1},
        {"sampling": Sampling(temperature=0.5, top_k=3, top_logprobs=2, max_tokens=4)},
        {"sampling": Sampling(truncate_prompt_tokens=2, max_tokens=4)},
        {"sampling": Sampling(logit_bias=((10**6, 1.0),))},
    ],
    ids=["plain", "greedy", "evaluation", "truncated", "cut_prompt", "refused"],
)
def test_a_group_sampled_in_one_request_has_the_rows_of_single_rollouts(
    how: dict[str, Any],
) -> None:
    together = rows_of(speaking(version=2), **how)
    assert together == rows_of(speaking(version=2), one_by_one=True, **how)
    assert len({row["experience_id"] for row in together}) == len(together)


def test_the_requests_of_a_group_are_one() -> None:
    asked: list[int] = []

    class Counts(ChatPolicy):
        async def answers(
            self, messages: Sequence[Message], sampling: Sequence[Sampling]
        ) -> list[Completion]:
            asked.append(len(sampling))
            return await super().answers(messages, sampling)

    rows_of(Counts(speaking().engine), greedy_rollouts=1)
    assert asked == [4, 4]


def test_a_group_that_takes_too_long_keeps_what_was_sampled() -> None:
    policy = speaking(max_length=30_000)
    timer = RolloutTimer()
    rows = rows_of(policy, sampling=ENDLESS, rollout_timeout=0.05, timer=timer)
    assert {row["finish_reason"] for row in rows} == {"timeout"}
    assert {row["drop_reason"] for row in rows} == {"workflow failed: it took longer than 0.05 s"}
    assert {row["reward"] for row in rows} == {None}
    assert timer == RolloutTimer()  # it does not count what was cut short


def test_a_group_that_is_stopped_keeps_what_was_sampled() -> None:
    async def stopped() -> list[Experience]:
        spec = spec_of(single_turn, group_size=3, sampling=ENDLESS)
        stop = CancelScope()
        with cancel_scope(stop):
            made = asyncio.create_task(
                run_tasks([(0, task(1))], speaking(max_length=30_000), spec, batch=1)
            )
        asyncio.get_running_loop().call_later(0.05, stop.set, "enough")
        return await asyncio.wait_for(made, 30)

    rows = asyncio.run(stopped())
    assert [row.drop_reason for row in rows] == ["stopped: enough"] * 3
    assert {row.finish_reason for row in rows} == {"abort"}


def test_rewards_that_wait_do_so_together() -> None:
    begun = 0
    all_begun = asyncio.Event()

    async def waits(task: Task, row: Experience) -> float:
        nonlocal begun
        begun += 1
        if begun == 3:
            all_begun.set()
        await all_begun.wait()
        return 1.0

    async def judged() -> list[Experience]:
        rewards = Rewards({"waits": RewardPart(waits)}, seconds=30)
        return await rewards.of_rows(task(1), [Experience(task_id="t")] * 3)

    assert [row.reward for row in asyncio.run(judged())] == [1.0] * 3
