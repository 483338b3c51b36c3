"""Workflows that act in environments: turns, rewards, steps as rows, and what is always closed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import polars as pl
import pytest
from support.builders import line_of
from support.builders import rows as frame_of
from support.rollouts import rollouts, script
from support.tiny_models import speaking, tiny

from rlake.loop.environments.environment import Shown, Step
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Policy, PolicyError
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.rollouts.group import workflow_of
from rlake.operators import gigpo, step_zscore
from rlake.store import Experience, Task
from rlake.store.errors import ConfigError
from rlake.store.records import Message

TASK = Task.ask("Reach 3.", "3")


class Counting:
    """Counts up at each `+`, gives 1 at 3; knows how many of it are open, and were closed."""

    opened: ClassVar[int] = 0
    most: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def __init__(self, *, fails: str | None = None, gives: bool = True) -> None:
        self._at, self._fails, self._gives = 0, fails, gives
        Counting.opened += 1
        Counting.most = max(Counting.most, Counting.opened - Counting.closed)

    async def reset(self, task: Task) -> Shown:
        await asyncio.sleep(0)
        if self._fails == "reset":
            raise OSError("no such world")
        return f"at 0 in world {Counting.opened}" if self._fails == "moody" else "at 0"

    async def step(self, answer: Message) -> Step:
        await asyncio.sleep(0)
        if self._fails == "step" and self._at == 1:
            raise OSError("the world broke")
        if self._fails == "hangs":
            await asyncio.Event().wait()
        known = answer["content"] == "+"
        self._at += known
        done = self._at == 3
        return Step(
            shown=f"at {self._at}",
            reward=float(done) if self._gives else None,
            is_done=done,
            metrics={} if known else {"environment/invalid": 1.0},
        )

    async def close(self) -> None:
        Counting.closed += 1
        if self._fails == "leaks":
            raise OSError("still in use")
        if self._fails == "stays":
            await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Counting.opened = Counting.most = Counting.closed = 0


def tries(
    policy: Policy,
    workflow: str = "multi_turn",
    *,
    fails: str | None = None,
    gives: bool = True,
    group_size: int = 1,
    rollout_timeout: float | None = None,
    **parameters: Any,
) -> list[Experience]:
    """Let a policy act, as an explorer would."""
    environment = {f"{__name__}:Counting": {"fails": fails, "gives": gives}}
    spec = {workflow: {"environment": environment, **parameters}}
    limits: Any = {"group_size": group_size, "rollout_timeout": rollout_timeout}
    rows = rollouts(policy, spec, TASK, rewards="exact_match", **limits)
    assert Counting.closed == Counting.opened
    return rows


def stepped(policy: Policy, **parameters: Any) -> list[Experience]:
    """Let a policy act step by step."""
    return tries(policy, "step_wise", **parameters)


def answers(*texts: str) -> ScriptedPolicy:
    return ScriptedPolicy(texts)


def test_policy_and_environment_answer_each_other_in_one_row_with_the_summed_reward() -> None:
    [row] = tries(answers("+", "-", "+", "+"))
    assert (row.reward, row.rewards) == (1.0, {"environment": 1.0})
    assert row.messages is not None
    assert [m["content"] for m in row.messages] == [
        "Reach 3.\n\nat 0", "+", "at 1", "-", "at 1", "+", "at 2", "+",
    ]  # fmt: skip
    assert (row.num_turns, row.finish_reason, row.drop_reason) == (4, "stop", None)
    assert sum(row.loss_mask or ()) == 8  # each answer with its end token
    assert row.metrics["environment/steps"] == 4
    assert row.metrics["environment/invalid"] == 1


def test_an_episode_has_as_many_turns_as_it_may() -> None:
    [row] = tries(answers("+"), max_turns=2)
    assert (row.num_turns, row.reward, row.finish_reason) == (2, 0.0, "max_turns")


def test_without_rewards_of_the_environment_those_of_the_configuration_judge_the_last_answer() -> (
    None
):
    [row] = tries(answers("+", "3"), gives=False, max_turns=2)
    assert (row.reward, row.rewards) == (1.0, {"exact_match": 1.0})


@pytest.mark.parametrize(
    ("fails", "said", "num_turns"),
    [("reset", "OSError: no such world", 0), ("step", "OSError: the world broke", 2)],
)
def test_an_environment_that_raises_costs_its_try_and_keeps_what_was_sampled(
    fails: str, said: str, num_turns: int
) -> None:
    [row] = tries(answers("+"), fails=fails)
    where = line_of(__file__, said.partition(": ")[2])
    assert row.drop_reason == f"workflow failed: {said} {where}"
    assert (row.num_turns, row.reward, row.finish_reason) == (num_turns, None, "error")


def test_an_environment_that_hangs_is_closed_when_the_try_takes_too_long() -> None:
    [row] = tries(answers("+"), fails="hangs", rollout_timeout=0.05)
    assert row.finish_reason == "timeout"
    assert row.num_turns == 1


@pytest.mark.parametrize("fails", ["leaks", "stays"])
def test_an_environment_that_cannot_be_closed_is_counted_and_the_row_stays_good(fails: str) -> None:
    [row] = tries(answers("+"), fails=fails, close_seconds=0.05)
    assert (row.reward, row.drop_reason) == (1.0, None)
    assert row.metrics["environment/leaked"] == 1


def test_as_many_environments_are_open_as_may_be() -> None:
    rows = tries(ScriptedPolicy(lambda messages, i: "+"), group_size=8, at_once=3)
    assert [row.reward for row in rows] == [1.0] * 8
    assert (Counting.most, Counting.opened) == (3, 8)


class Overflowing:
    """A policy whose context is full after some turns."""

    version = 0

    def __init__(self, turns: int) -> None:
        self._left, self._policy = turns, answers("+")

    async def generate(self, messages: Sequence[Message], **rest: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise PolicyError("the prompt has 99 tokens", finish_reason="context_overflow")
        return await self._policy.generate(messages, **rest)


@pytest.mark.parametrize("workflow", ["multi_turn", "step_wise"])
def test_a_context_that_overflows_ends_the_try_and_keeps_its_turns_and_their_reward(
    workflow: str,
) -> None:
    rows = tries(Overflowing(2), workflow)
    assert sum(row.num_turns or 0 for row in rows) == 2
    assert {row.drop_reason for row in rows} == {None}
    assert (rows[-1].finish_reason, rows[-1].reward) == ("context_overflow", 0.0)


def test_a_task_that_is_too_long_by_itself_fails() -> None:
    [row] = tries(Overflowing(0))
    assert (row.finish_reason, row.num_turns, row.reward) == ("context_overflow", 0, None)
    where = line_of(__file__, "the prompt has 99")
    assert row.drop_reason == f"workflow failed: the prompt has 99 tokens {where}"


def test_the_real_model_overflows_in_the_midst_of_a_conversation() -> None:
    [row] = tries(speaking(), max_turns=16)
    assert (row.finish_reason, row.reward, row.drop_reason) == ("context_overflow", 0.0, None)
    assert (row.num_turns or 0) > 1
    assert len(row.token_ids or ()) <= 48


@pytest.mark.parametrize(
    ("rule", "rewards"),
    [
        ("last", [0.0, 0.0, 0.0, 1.0]),
        ("all", [1.0] * 4),
        ("discounted", [0.125, 0.25, 0.5, 1.0]),
        ("own", [0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_steps_are_rows_with_rewards_by_a_rule(rule: str, rewards: list[float]) -> None:
    rows = stepped(answers("+", "-", "+", "+"), rewards=rule, gamma=0.5)
    assert [row.reward for row in rows] == rewards
    assert [row.prompt_text for row in rows] == [f"Reach 3.\n\nat {i}" for i in (0, 1, 1, 2)]
    assert [row.num_turns for row in rows] == [1] * 4
    assert [row.experience_id for row in rows] == [
        f"demo/000001/0000/00{end}" for end in ("", ".1", ".2", ".3")
    ]


def test_a_step_sees_as_many_earlier_steps_as_it_should() -> None:
    texts = [[m["content"] for m in row.messages or ()] for row in stepped(answers("+"), history=1)]
    assert texts == [
        ["Reach 3.\n\nat 0", "+"],
        ["Reach 3.\n\nat 0", "+", "at 1", "+"],
        ["Reach 3.\n\nat 1", "+", "at 2", "+"],
    ]
    [*_, last] = stepped(answers("+"), history=None)
    assert len(last.messages or ()) == 6
    assert last.loss_mask is not None
    assert sum(last.loss_mask) == 2


def test_steps_are_what_algorithms_of_several_steps_take() -> None:
    policy = answers(*"+++", *"+-+-")
    rows = frame_of(stepped(policy, max_turns=3) + renamed(stepped(policy, max_turns=3)))
    by_outcome = rows.pipe(step_zscore(epsilon=0.0))
    assert by_outcome["advantage"].round(3).to_list() == [0.707] * 3 + [-0.707] * 3
    credit = rows.pipe(gigpo(gamma=0.5))
    at_one = credit.filter(pl.col("prompt_text").str.ends_with("at 1"))
    assert at_one["advantage"].n_unique() > 1


def renamed(rows: list[Experience]) -> list[Experience]:
    return [
        replace(r, rollout_index=1, experience_id=str(r.experience_id).replace("/00", "/01"))
        for r in rows
    ]


def retried(policy: Policy, **parameters: Any) -> list[Experience]:
    """Let a policy act in three turns, and go on from a step that it names."""
    return tries(policy, "retry_from_step", **{"max_turns": 3, **parameters})


def part(row: Experience) -> tuple[object, object, float | None]:
    told = row.metadata or {}
    return told["part"], told.get("step"), row.reward


def sampled(row: Experience) -> str:
    """What is trained on: the scripted policy's tokens are characters."""
    pairs = zip(row.token_ids or (), row.loss_mask or (), strict=True)
    return "".join(chr(token) for token, is_sampled in pairs if is_sampled)


def test_an_episode_goes_on_from_the_step_that_failed_and_only_what_differs_is_trained_on() -> None:
    policy, asked = script("+", "-", "-", "Step 2 was no `+`.", "+", "+", version=7)
    first, reflection, retry = retried(policy)
    assert [part(row) for row in (first, reflection, retry)] == [
        ("first", 2, 0.0),
        ("reflection", None, 1.0),
        ("retry", 2, 1.0),
    ]
    assert "reward of 0. Your answers are steps 1 to 3." in asked[3][-1]["content"]
    assert [m["content"] for m in asked[4][:2]] == ["Reach 3.\n\nat 0", "+"]
    assert asked[4][-1]["content"].startswith("at 1\n\nWhat was learned")
    assert [m["content"] for m in retry.messages or ()] == [
        "Reach 3.\n\nat 0", "+", "at 1", "+", "at 2", "+",
    ]  # fmt: skip
    assert (sampled(first), sampled(retry)) == ("-\0-\0", "+\0+\0")
    prompt = [ord(c) for c in "Reach 3.\n\nat 0+\0at 1"]
    for row in (first, retry):
        assert list(row.token_ids or ())[: row.prompt_length] == prompt
        assert sum(row.logprobs or ()) == -0.5 * sum(row.loss_mask or ())
    assert (first.finish_reason, retry.finish_reason) == ("max_turns", "stop")
    assert retry.metrics["is_guided"] == 1
    assert (reflection.group_id or "").endswith("/reflections")
    assert Counting.opened == 2


def test_what_a_model_sampled_with_a_hint_stands_token_for_token_behind_the_plain_prompt() -> None:
    policy = ChatPolicy(TransformersEngine(*tiny(max_length=400)))
    first, _, retry = retried(policy)
    assert (
        list(retry.token_ids or ())[: retry.prompt_length]
        == (list(first.token_ids or ())[: first.prompt_length])
    )
    guided = retried(policy, keep_hint=True)[2]
    assert sampled(guided) == sampled(retry)
    assert [p for p in guided.logprobs or () if p] == [p for p in retry.logprobs or () if p]
    assert (guided.prompt_length or 0) > (retry.prompt_length or 0)
    assert retry.num_turns == 3


def test_a_reflection_that_names_no_step_begins_anew() -> None:
    *_, retry = retried(answers("-", "-", "-", "Hm.", "+", "+", "+"))
    assert part(retry) == ("retry", 1, 1.0)
    assert retry.num_turns == 3
    assert retry.metrics["retry/no_step"] == 1


def test_an_environment_that_shows_something_else_is_not_tried_again() -> None:
    first, reflection = retried(answers("-", "-", "-", "Step 3."), fails="moody")
    assert [part(row) for row in (first, reflection)] == [
        ("first", None, 0.0),
        ("reflection", None, None),
    ]
    assert reflection.metrics["retry/differs"] == 1


@pytest.mark.parametrize("turns", [3, 4])
def test_a_lesson_that_is_too_long_leaves_the_first_episode(turns: int) -> None:
    rows = retried(Overflowing(turns), max_turns=3, enough=2.0)
    assert [part(row)[0] for row in rows] == ["first", "reflection"][: turns - 2]
    assert {row.drop_reason for row in rows} == {None}
    assert rows[0].reward == 1.0


def test_an_episode_that_is_good_or_unjudged_is_not_looked_back_on() -> None:
    assert [part(row) for row in retried(answers("+"))] == [("first", None, 1.0)]
    [row] = retried(answers("+", "+", "3"), gives=False)
    assert row.rewards == {"exact_match": 1.0}


def test_a_workflow_needs_an_environment() -> None:
    with pytest.raises(ConfigError, match="`environment`"):
        workflow_of({"multi_turn": {"environment": 3}})
    with pytest.raises(ConfigError, match="needs `environment`"):
        workflow_of("multi_turn")
