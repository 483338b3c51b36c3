"""Agents that somebody wrote already, trained as they are: workflow `agent`, and frameworks."""

import asyncio
from typing import Any

import pytest
from support import environments as acting
from support.rollouts import rollouts
from support.scripted_models import parrot, spoken

from rlake.loop.inference.policy import Policy
from rlake.loop.rollouts.group import workflow_of
from rlake.loop.trajectories.rewards import RewardPart
from rlake.loop.workflows.agent import agent
from rlake.store import Experience, Task
from rlake.store.errors import ConfigError

TASK = Task.ask("2+3=", "5")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def tried(policy: Policy, **parameters: Any) -> list[Experience]:
    """Try the task once with an agent."""
    return rollouts(policy, {"agent": parameters}, TASK, rewards={"right": RewardPart(_right)})


def _right(task: Task, experience: Experience) -> float:
    return float(experience.response_text == task.answer)


def test_an_agent_is_judged_by_what_it_returns() -> None:
    policy = parrot(CALL, "5")
    [row] = tried(policy, function="support.environments:calculator", arguments={"stream": True})
    assert spoken(row, policy)[1] == [f"{CALL}<eos>", "5<eos>"]
    assert (row.reward, row.rewards, row.num_turns) == (1.0, {"right": 1.0}, 2)


def test_an_agent_that_blocks_works_in_a_thread() -> None:
    [row] = tried(parrot("5"), function="support.environments:blocking", arguments={"prefix": "="})
    assert (row.response_text, row.reward) == ("=5", 0.0)


def test_an_agent_that_blocks_for_ever_holds_up_neither_the_loop_nor_its_end() -> None:
    async def work() -> None:
        async with asyncio.timeout(0.05):
            await agent(TASK, parrot("5"), function="support.environments:stuck")

    try:
        with pytest.raises(TimeoutError):
            asyncio.run(work())
        assert not acting.ENDED.is_set()
    finally:
        acting.MAY_END.set()


def test_an_agent_may_make_its_own_client_and_return_its_reward() -> None:
    rows = tried(parrot("5", "yes"), function="support.environments:by_address")
    assert [row.response_text for row in rows] == ["5", "yes"]
    assert [dict(row.rewards) for row in rows] == [{"care": 0.5, "luck": 0.25}] * 2
    assert [row.reward for row in rows] == [0.75] * 2


def test_an_agent_that_returns_nothing_is_judged_by_the_last_answer() -> None:
    [row] = tried(parrot("5"), function="support.environments:silent")
    assert row.reward == 1.0


def test_an_agent_that_asks_nothing_fails_and_says_why() -> None:
    [row] = tried(parrot(), function="support.environments:idle")
    assert "asked nothing of the policy" in (row.drop_reason or "")


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({}, "needs `function`"),
        ({"function": "support.environments:nobody"}, "no agent `support.environments:nobody`"),
        ({"function": "support.environments:deaf"}, "neither `client` nor `base_url`"),
    ],
)
def test_an_agent_that_cannot_be_is_refused_before_any_work(
    parameters: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        workflow_of({"agent": parameters})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [({}, "needs `knife`"), ({"knife": "k", "fork": "f"}, "no parameter `fork`")],
)
def test_an_agents_arguments_fit_its_parameters(arguments: dict[str, Any], told: str) -> None:
    [row] = tried(parrot(), function="support.environments:choosy", arguments=arguments)
    assert told in (row.drop_reason or "")
