"""Tries at tasks: workflow, rewards and ids, with a scripted policy or a tiny real one."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from support.builders import line_of, task
from support.rollouts import rollouts
from support.tiny_models import speaking, table

from rlake.loop.inference.policy import Completion, Policy
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.rollouts.group import workflow_of
from rlake.loop.rollouts.writer import store_rows
from rlake.loop.trajectories.rewards import RewardPart, rewards_of
from rlake.loop.workflows import Workflow, single_turn
from rlake.loop.workflows.single_turn import experience
from rlake.operators.reward_protocol import of_group
from rlake.operators.rewards import Verdict
from rlake.store import Experience, Store, Task
from rlake.store.errors import ConfigError


def tries(
    policy: Policy,
    *,
    tasks: Sequence[Task] = (),
    workflow: Workflow = single_turn,
    rewards: Any = "exact_match",
    group_size: int = 2,
    **how: Any,
) -> list[Experience]:
    """Try tasks and return the rows."""
    some = tasks or [task(1), task(2)]
    return rollouts(policy, workflow, *some, rewards=rewards, group_size=group_size, **how)


def answers(*texts: str) -> ScriptedPolicy:
    return ScriptedPolicy(texts, version=5)


def test_the_sampled_tokens_alone_are_trained_on_and_all_columns_are_aligned() -> None:
    policy = speaking(version=2)
    for row in tries(policy, group_size=4):
        assert row.token_ids is not None
        assert row.loss_mask is not None
        assert row.logprobs is not None
        assert row.prompt_length == 4
        sampled = len(row.token_ids) - 4
        assert list(row.loss_mask) == [False] * 4 + [True] * sampled
        assert len(row.logprobs) == len(row.token_ids)
        assert list(row.logprobs[:4]) == [0.0] * 4
        assert all(x < 0 for x in row.logprobs[4:])
        assert policy.engine.tokenizer.decode(list(row.token_ids[:4])) == row.prompt_text
        text = policy.engine.tokenizer.decode(list(row.token_ids[4:]), skip_special_tokens=True)
        assert text == row.response_text
        assert row.segments == [{"policy_version": 2, "num_tokens": sampled}]
        assert (row.policy_version, row.num_turns) == (2, 1)
        assert row.messages is not None
        assert row.messages[-1] == {"role": "assistant", "content": text}


def test_an_engine_without_logprobs_or_tokens_gives_null_and_not_zeros() -> None:
    bare = Completion(text="2", finish_reason="stop")
    row = experience(task(1), bare)
    assert (row.token_ids, row.loss_mask, row.logprobs) == (None, None, None)
    row = experience(task(1), replace(bare, prompt_ids=[1, 2], token_ids=[3]))
    assert (row.token_ids, row.loss_mask, row.logprobs) == ([1, 2, 3], [False, False, True], None)


def test_ids_say_run_batch_task_and_try_and_sort_in_that_order() -> None:
    rows = tries(answers("2"), group_size=3, batch=12)
    assert [r.experience_id for r in rows] == [
        f"demo/000012/{place:04d}/{i:02d}" for place in (0, 1) for i in range(3)
    ]
    assert [r.group_id for r in rows] == ["demo/000012/0000"] * 3 + ["demo/000012/0001"] * 3
    assert [r.rollout_index for r in rows] == [0, 1, 2] * 2
    assert {(r.run_id, r.batch) for r in rows} == {("demo", 12)}
    assert [r.task_id for r in rows] == [task(1).task_id] * 3 + [task(2).task_id] * 3


def test_a_rollout_that_is_made_again_is_the_same_alone_or_among_others() -> None:
    policy = speaking()
    whole = tries(policy, group_size=3)
    again = tries(policy, group_size=3)
    # all but how long it took
    assert [replace(r, timings={}) for r in again] == [replace(r, timings={}) for r in whole]
    part = tries(policy, group_size=3, first=1)
    assert [r.token_ids for r in part] == [r.token_ids for r in whole[3:]]
    assert [r.experience_id for r in part] == [r.experience_id for r in whole[3:]]


@pytest.mark.parametrize("other", [{"seed": 1}, {"batch": 2}, {"run_id": "other"}])
def test_another_seed_batch_or_run_gives_other_tries(other: dict[str, Any]) -> None:
    policy = speaking()
    one, two = tries(policy, group_size=6), tries(policy, group_size=6, **other)
    assert [r.token_ids for r in one] != [r.token_ids for r in two]


def test_tries_at_one_task_differ() -> None:
    rows = tries(speaking(), tasks=[task(1)], group_size=8)
    assert len({tuple(r.token_ids or ()) for r in rows}) > 4


def test_the_requests_of_one_rollout_have_seeds_of_their_own() -> None:
    async def asks_twice(task: Task, policy: Policy) -> list[Experience]:
        return [
            experience(task, completion)
            for _ in range(2)
            for completion in await policy.generate(task.messages)
        ]

    rows = tries(speaking(), workflow=asks_twice, group_size=6)
    assert any(a.token_ids != b.token_ids for a, b in zip(rows[::2], rows[1::2], strict=True))
    assert [r.experience_id for r in rows[:4]] == [
        f"demo/000001/0000/{rollout}" for rollout in ("00", "00.1", "01", "01.1")
    ]
    assert {r.group_id for r in rows[:12]} == {"demo/000001/0000"}


def length(task: Task, experience: Experience) -> float:
    return float(len(experience.response_text or ""))


def unsure(task: Task, experience: Experience) -> float | None:
    return None if experience.response_text == "3" else 1.0


def judged(weights: dict[str, RewardPart], *texts: str) -> list[Experience]:
    return tries(answers(*texts), tasks=[task(1)], group_size=len(texts), rewards=weights)


def test_several_rewards_are_added_with_their_weights() -> None:
    named = rewards_of({"exact_match": 2.0, "support.tiny_models:share_of_ones": 0.5})
    rows = judged(named, "2", "111")
    assert [r.rewards for r in rows] == [
        {"exact_match": 2.0, "share_of_ones": 0.0},
        {"exact_match": 0.0, "share_of_ones": 0.5},
    ]
    assert [r.reward for r in rows] == [2.0, 0.5]


def test_a_reward_of_none_makes_the_reward_null_and_not_zero() -> None:
    rows = judged({"unsure": RewardPart(unsure), "length": RewardPart(length)}, "2", "3")
    assert [r.reward for r in rows] == [2.0, None]
    assert rows[1].rewards == {"unsure": None, "length": 1.0}
    assert rows[1].drop_reason is None


def test_without_rewards_the_reward_is_null() -> None:
    assert [r.reward for r in judged({}, "2")] == [None]


def test_a_reward_that_a_workflow_gave_is_kept() -> None:
    async def judges(task: Task, policy: Policy) -> Experience:
        return replace(await single_turn(task, policy), reward=0.25)

    rows = tries(answers("2"), workflow=judges)
    assert {r.reward for r in rows} == {0.25}


def fails_at_three(task: Task, experience: Experience) -> float:
    if experience.response_text == "3":
        raise KeyError("no such unit")
    return 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_leaves_the_row_without_one(bad: float) -> None:
    [row] = judged({"odd": RewardPart(lambda task, experience: bad)}, "2")
    assert row.reward is None
    assert row.drop_reason is not None
    assert f"reward `odd` failed: the reward is {bad}" in row.drop_reason


def test_a_reward_that_raises_costs_its_own_row_only_and_the_tokens_are_kept() -> None:
    rows = judged(
        {"fails": RewardPart(fails_at_three), "length": RewardPart(length)}, "2", "3", "4"
    )
    assert [r.reward for r in rows] == [2.0, None, 2.0]
    assert [r.drop_reason for r in rows] == [
        None,
        f"reward `fails` failed: KeyError: 'no such unit' {line_of(__file__, 'no such unit')}",
        None,
    ]
    assert rows[1].token_ids is not None
    assert rows[1].rewards == {"fails": None, "length": 1.0}


async def waits(task: Task, experience: Experience) -> Verdict:
    await asyncio.sleep(60 if experience.response_text == "3" else 0.001)
    return Verdict(1.0, "looked at")


def test_an_async_reward_is_waited_for_but_not_longer_than_a_try() -> None:
    began = time.monotonic()
    rewards = {"waits": RewardPart(waits, 0.5), "length": RewardPart(length)}
    rows = tries(
        answers("2", "3", "4"), tasks=[task(1)], group_size=3, rewards=rewards, rollout_timeout=0.2
    )
    assert [r.reward for r in rows] == [1.5, None, 1.5]
    assert rows[1].drop_reason == "reward `waits` failed: it took longer than 0.2 s"
    assert rows[1].rewards == {"waits": None, "length": 1.0}
    assert rows[1].token_ids is not None
    assert rows[0].metadata == {"reward_details": {"waits": "looked at"}}
    assert time.monotonic() - began < 20


@of_group
async def share_of_longest(
    task: Task, experiences: list[Experience], *, bonus: float = 0.0
) -> list[float]:
    longest = max(len(e.response_text or "") for e in experiences)
    return [len(e.response_text or "") / longest + bonus for e in experiences]


@of_group
def one_too_few(task: Task, experiences: list[Experience]) -> list[float]:
    return [1.0] * (len(experiences) - 1)


def test_a_reward_of_groups_compares_the_tries_of_each_group() -> None:
    rewards = {
        "length": RewardPart(length),
        "longest": RewardPart(cast(Any, share_of_longest), 2.0),
    }
    rows = tries(answers("2", "22", "4", "4444"), group_size=2, rewards=rewards)
    assert [r.rewards for r in rows] == [
        {"length": 1.0, "longest": 1.0},
        {"length": 2.0, "longest": 2.0},
        {"length": 1.0, "longest": 0.5},
        {"length": 4.0, "longest": 2.0},
    ]
    assert [r.reward for r in rows] == [2.0, 4.0, 1.5, 6.0]


def test_a_reward_of_groups_leaves_failed_tries_out_and_may_fail_itself() -> None:
    rows = tries(
        answers("4", "44"),
        workflow=breaks_at_one,
        group_size=2,
        rewards={"x": RewardPart(cast(Any, one_too_few))},
    )
    assert [r.reward for r in rows] == [None] * 4
    assert ["a judge of groups returned [1.0]" in (r.drop_reason or "") for r in rows] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"overlong": {"max_tokens": 5}}, "needs `cache`"),
        ({"overlong": {"max_tokens": 5, "cache": 1, "weight": "much"}}, "must be a number"),
        ({"exact_match": {"offset": "-1"}}, "the offset of reward `exact_match` must be a number"),
        ({"exact_match": {"weigth": 1.0}}, "no parameter `weigth`"),
    ],
)
def test_a_reward_configured_wrongly_says_how(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rewards_of(spec)


def test_weights_and_parameters_stand_together() -> None:
    spec = {"exact_match": 2.0, "overlong": {"max_tokens": 5, "cache": 1, "weight": 0.5}}
    named = rewards_of({**spec, "numeric_answer": None})
    assert [part.weight for part in named.values()] == [2.0, 0.5, 1.0]
    long = Experience(task_id="t", token_ids=[1] * 9, prompt_length=0)
    assert named["overlong"].function(Task.ask("?"), long) == -1.0


async def breaks_at_one(task: Task, policy: Policy) -> Experience:
    if task.answer == "2":
        raise TimeoutError("no answer from the sandbox")
    return await single_turn(task, policy)


def test_a_workflow_that_raises_becomes_a_row_that_says_so_and_the_others_go_on(
    store: Store,
) -> None:
    rows = tries(answers("4"), workflow=breaks_at_one, batch=3)
    where = line_of(__file__, "no answer from")
    said = f"workflow failed: TimeoutError: no answer from the sandbox {where}"
    assert [r.drop_reason for r in rows] == [said, said, None, None]
    failed = rows[0]
    assert (failed.token_ids, failed.reward, failed.finish_reason) == (None, None, "error")
    assert (failed.task_id, failed.prompt_text) == (task(1).task_id, "1+1=")
    assert (failed.experience_id, failed.group_id) == ("demo/000003/0000/00", "demo/000003/0000")
    assert (failed.policy_version, failed.batch, failed.run_id) == (5, 3, "demo")
    store_rows(store, rows)
    assert store.count("experiences") == 4


@pytest.mark.parametrize(
    ("made", "said"), [([], "it returned no experience"), ("2", "expected rows, a reward")]
)
def test_a_workflow_that_returns_nothing_usable_becomes_a_row_that_says_so(
    made: Any, said: str
) -> None:
    async def odd(task: Task, policy: Policy) -> Any:
        return made

    rows = tries(answers("2"), workflow=odd)
    assert len(rows) == 4
    assert all(said in (r.drop_reason or "") for r in rows)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": [0.0]}, "column `logprobs` of `experiences` has 1 values"),
        ({"source": "heaven"}, "column `source` of `experiences` holds 'heaven'"),
        ({"metrics": {"x": math.nan}}, "`metrics` of `experiences` holds NaN"),
        ({"metadata": {"x": {1, 2}}}, "not JSON serializable"),
    ],
)
def test_a_row_that_the_store_refuses_costs_itself_only(
    store: Store, change: dict[str, Any], said: str
) -> None:
    async def odd(task: Task, policy: Policy) -> Experience:
        row = await single_turn(task, policy)
        return replace(row, **change) if task.answer == "2" else row

    made = tries(answers("2"), workflow=odd, group_size=1)
    stored = store_rows(store, made)
    assert [r.drop_reason is None for r in stored] == [False, True]
    assert said in str(stored[0].drop_reason)
    found = table(store, "experiences", "experience_id, drop_reason").sort("experience_id").rows()
    assert found == [(r.experience_id, r.drop_reason) for r in stored]


def test_rows_that_are_stored_again_are_not_there_twice(store: Store) -> None:
    rows = tries(answers("2"))
    store_rows(store, rows)
    store_rows(store, rows)
    assert store.count("experiences") == len(rows)


def test_names_of_workflows_and_rewards_are_looked_up_with_the_nearest() -> None:
    assert workflow_of("single_turn") is single_turn
    assert set(rewards_of("exact_match")) == {"exact_match"}
    with pytest.raises(ConfigError, match="no workflow `single_trun`; did you mean `single_turn`"):
        workflow_of("single_trun")
    with pytest.raises(ConfigError, match="no reward `exact`; did you mean `exact_match`"):
        rewards_of("exact")
    with pytest.raises(ConfigError, match=r"no reward `support\.tiny_models:nobody`"):
        rewards_of("support.tiny_models:nobody")
    with pytest.raises(ConfigError, match="must be a function, got dict"):
        rewards_of("support.tiny_models:SPEC")


async def twice(task: Task, policy: Policy) -> list[Experience]:
    """A workflow of a task's own: it answers twice."""
    completions = await policy.generate(task.messages, n=2)
    return [experience(task, c) for c in completions]


def test_a_task_that_names_a_workflow_is_tried_with_its_own() -> None:
    own = replace(task(1), workflow=f"{__name__}:twice")
    lost = replace(task(3), workflow="sngle_turn")
    rows = tries(answers("2", "4"), tasks=[own, task(2), lost], group_size=1)
    names = ("0000/00", "0000/00.1", "0001/00", "0002/00")
    assert [row.experience_id for row in rows] == [f"demo/000001/{name}" for name in names]
    assert rows[2].drop_reason is None
    assert "did you mean `single_turn`?" in (rows[3].drop_reason or "")
