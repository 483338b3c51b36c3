"""Groups that are sampled in one request have the rows that rollouts one by one have."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, cast

import pytest
from support.builders import task
from support.rollouts import run_tasks, spec_of
from support.tiny_models import speaking, tiny

from rlake.loop.inference.cancellation import CancelScope, cancel_scope
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.engine import Engine, Request, Sampled
from rlake.loop.inference.policy import PolicyError, Sampling
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.models.state_dict import copied, weights_digest
from rlake.loop.models.weights import Weights
from rlake.loop.rollouts import timeouts
from rlake.loop.rollouts.timeouts import RolloutTimer
from rlake.loop.trajectories.rewards import RewardPart
from rlake.loop.workflows.single_turn import single_turn
from rlake.store import Experience, Task


def rows_of(policy: ChatPolicy, *, one_by_one: bool = False, **how: Any) -> list[dict[str, Any]]:
    """Return the rows of two groups, without their times; slots make rollouts run one by one."""
    spec = spec_of(single_turn, **{"group_size": 3, "rewards": "exact_match"} | how)

    async def made() -> list[Experience]:
        slots = asyncio.Semaphore(100) if one_by_one else None
        tasks = [(0, task(1)), (1, task(2))]
        return await run_tasks(tasks, policy, replace(spec, slots=slots), batch=3)

    return [row.row() | {"timings": None} for row in asyncio.run(made())]


class Awkward:
    """The tiny model's engine, of which the first request that it gets is awkward."""

    def __init__(self, how: str) -> None:
        self.inner, self.how = speaking(version=2).engine, how
        self.seeds: list[int] = []
        self.others = 0
        self.others_ended = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        self.seeds += [one.sampling.seed for one in requests]
        is_first = len(self.seeds) == len(requests)
        if is_first and self.how != "abort":
            await self.others_ended.wait()
            if self.how == "stays":
                await asyncio.Event().wait()  # until it is cancelled: it ignores `abort`
            raise PolicyError("no room") if self.how == "fails" else ValueError("no memory")
        sampled = await self.inner.complete(requests)
        self.others += len(requests)
        if self.others == 2:
            self.others_ended.set()
        return [replace(one, finish_reason="abort") for one in sampled] if is_first else sampled


def with_awkward(how: str, *, one_by_one: bool = False, **changes: Any) -> list[dict[str, Any]]:
    """Return the rows of a group of three; no request may be sent twice.

    Without log-probs, whose last digits depend on the size of a batch.
    """
    spec = spec_of(single_turn, **{"group_size": 3, "rewards": "exact_match"} | changes)

    async def made() -> list[Experience]:
        engine = Awkward(how)
        stop = CancelScope()
        with cancel_scope(stop):
            slots = asyncio.Semaphore(100) if one_by_one else None
            policy = ChatPolicy(cast(Engine, engine))
            work = run_tasks([(0, task(1))], policy, replace(spec, slots=slots), batch=3)
            running = asyncio.create_task(work)
        if how == "stays":
            await asyncio.wait_for(engine.others_ended.wait(), 30)
            for _ in range(20):  # turns of the loop, in which their rows are made
                await asyncio.sleep(0)
            if spec.rollout_timeout is None:
                stop.set("enough")
            else:
                # its clock goes on, as if all of this had taken longer
                loop, past = asyncio.get_running_loop(), 2 * spec.rollout_timeout
                loop.time = lambda: monotonic() + past  # type: ignore[method-assign]
        rows = await asyncio.wait_for(running, 30)
        assert len(engine.seeds) == len(set(engine.seeds)) == 3
        return rows

    return [row.row() | {"timings": None, "logprobs": None} for row in asyncio.run(made())]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"greedy_rollouts": 1},
        {"purpose": "eval", "group_size": 1},
        {"sampling": Sampling(temperature=0.5, top_k=3, top_logprobs=2, max_tokens=4)},
        {"sampling": Sampling(truncate_prompt_tokens=2, max_tokens=4)},
        {"sampling": Sampling(logit_bias=((10**6, 1.0),))},
        {"sampling": Sampling(json_schema="{")},
    ],
    ids=["plain", "greedy", "evaluation", "truncated", "cut_prompt", "refused", "no_schema"],
)
def test_a_group_sampled_in_one_request_has_the_rows_of_single_rollouts(
    how: dict[str, Any],
) -> None:
    together = rows_of(speaking(version=2), **how)
    assert together == rows_of(speaking(version=2), one_by_one=True, **how)
    assert len({row["experience_id"] for row in together}) == len(together)


@pytest.fixture
def _little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "GRACE_SECONDS", 0.02)


@pytest.mark.usefixtures("_little_grace")
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fails", "workflow failed: no room"),
        ("raises", "workflow failed: ValueError: no memory"),
        ("stays", "stopped: enough"),
        ("abort", None),
    ],
)
def test_one_request_of_a_group_that_goes_wrong_leaves_the_others(
    how: str, reason: str | None
) -> None:
    rows = with_awkward(how)
    assert rows == with_awkward(how, one_by_one=True)
    assert str(rows[0]["drop_reason"]).startswith(str(reason))
    whole = rows_of(speaking(version=2))[1:3]
    kept = ("token_ids", "reward", "drop_reason", "finish_reason")
    assert [[row[c] for c in kept] for row in rows[1:]] == [[row[c] for c in kept] for row in whole]
    assert bool(rows[0]["token_ids"]) == (how == "abort")


@pytest.mark.usefixtures("_little_grace")
def test_one_rollout_of_a_group_that_takes_too_long_leaves_the_others() -> None:
    timer = RolloutTimer(multiplier=1e6, min_samples=3)
    rows = with_awkward("stays", rollout_timeout=500.0, timer=timer)
    assert rows[0]["drop_reason"] == "workflow failed: it took longer than 500 s"
    assert [row["finish_reason"] == "timeout" for row in rows] == [True, False, False]
    assert [bool(row["token_ids"]) for row in rows] == [False, True, True]
    assert timer.limit(None) is None  # it does not count what was cut short
    timer.min_samples = 2
    assert timer.limit(None) is not None


def test_prompts_that_cannot_be_read_fail_only_their_own_rollouts() -> None:
    bad = [{"is_raw": True}, {"is_raw": True, "token_ids": ["a"]}]
    for message in bad:
        wrong = Task(messages=[{"role": "user", **message}], taskset="demo")
        groups = [(0, task(1)), (1, wrong)]
        rows = asyncio.run(
            run_tasks(groups, speaking(), spec_of(single_turn, group_size=2), batch=1)
        )
        assert [bool(row.drop_reason) for row in rows] == [False, False, True, True]


def test_rows_are_judged_before_the_whole_group_is_sampled() -> None:
    async def rows() -> list[Experience]:
        engine = Awkward("raises")
        engine.others = 10  # so that not their ends let the first request end, but their rewards
        begun: list[Experience] = []

        async def judged(task: Task, row: Experience) -> float:
            begun.append(row)
            if len(begun) == 2:
                engine.others_ended.set()
            return 1.0

        spec = spec_of(single_turn, group_size=3, rewards={"judged": RewardPart(judged)})
        policy = ChatPolicy(cast(Engine, engine))
        return await asyncio.wait_for(run_tasks([(0, task(1))], policy, spec, batch=1), 30)

    assert [row.reward for row in asyncio.run(rows())] == [None, 1.0, 1.0]


def test_weights_that_change_while_a_group_is_sampled_are_in_its_segments() -> None:
    policy = speaking(version=2, max_length=200)
    engine = cast(TransformersEngine, policy.engine)
    state = copied(tiny(seed=9)[0])
    new = Weights(version=3, digest=weights_digest(state), state=state)
    steps = 0

    async def made() -> list[Experience]:
        replaced = asyncio.get_running_loop().create_future()

        def replace_weights(*_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == 5:  # from within a step, so that no clock says how many came before
                vars(engine)["_swaps"].append((new, replaced))
                vars(engine)["_is_wanted"] = True

        cast(Any, engine.model).get_decoder().register_forward_pre_hook(replace_weights)
        sampling = Sampling(max_tokens=60, ignore_eos=True)
        spec = spec_of(single_turn, group_size=3, sampling=sampling)
        return await asyncio.wait_for(run_tasks([(0, task(1))], policy, spec, batch=1), 30)

    for row in asyncio.run(made()):
        [before, after] = list(row.segments or ())
        assert (before["policy_version"], after["policy_version"]) == (2, 3)
        assert before["num_tokens"] + after["num_tokens"] == sum(row.loss_mask or ()) == 60
        assert row.digests == [None, new.digest]
        assert row.policy_version == 2


def test_a_reward_may_write_into_the_metrics_of_its_row() -> None:
    def noting(task: Task, row: Experience) -> float:
        cast(dict[str, float], row.metrics)["length"] = len(row.token_ids or ())
        return 1.0

    sampling = Sampling(max_tokens=9)
    rows = rows_of(speaking(), rewards={"noting": RewardPart(noting)}, sampling=sampling)
    assert [row["metrics"] for row in rows] == [
        [{"name": "length", "value": len(row["token_ids"])}] for row in rows
    ]
    assert len({len(row["token_ids"]) for row in rows}) > 1


@pytest.mark.parametrize("kind", ["async def", "a lambda that returns an awaitable"])
def test_rewards_that_wait_do_so_together(kind: str) -> None:
    begun = 0
    all_begun = asyncio.Event()

    async def waits(task: Task, row: Experience) -> float:
        nonlocal begun
        begun += 1
        if begun == 6:
            all_begun.set()
        await all_begun.wait()
        return 1.0

    reward = waits if kind == "async def" else lambda task, row: waits(task, row)
    made = rows_of(speaking(), rewards={"waits": RewardPart(reward)}, rollout_timeout=30)
    assert [row["reward"] for row in made] == [1.0] * 6
