"""Advantages of rollouts of several rows, against loops over their steps."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import table

from rlake.operators import Operator, causal_returns, gigpo, group_zscore, step_zscore
from rlake.store.ids import rollout_id

Step = tuple[float | None, str | None]
Groups = Sequence[Sequence[Sequence[Step]]]
"""Of each group the rollouts, of each rollout the steps: their reward and their state."""

one_step = st.tuples(
    st.none() | st.sampled_from([0.0, 1.0, 0.1]) | st.floats(-5, 5).map(lambda x: round(x, 2)),
    st.none() | st.sampled_from(["door", "hall"]),
)
some_groups = st.lists(
    st.lists(st.lists(one_step, min_size=1, max_size=4), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)


def frame_of(groups: Groups, seed: int) -> pl.DataFrame:
    records = (
        {
            "reward": reward,
            "experience_id": rollout_id(f"g{g}", i, j),
            "group_id": f"g{g}",
            "rollout_index": i,
            "prompt_text": state,
        }
        for g, rollouts in enumerate(groups)
        for i, steps in enumerate(rollouts)
        for j, (reward, state) in enumerate(steps)
    )
    return table(records).sample(fraction=1.0, shuffle=True, seed=seed)


def found_by(op: Operator, groups: Groups, seed: int) -> dict[str, float | None]:
    made = op(frame_of(groups, seed))
    return dict(made.select("experience_id", "advantage").iter_rows())


def normed(values: dict[Any, float], *, std: bool, epsilon: float = 1e-6) -> dict[Any, float]:
    v = np.array(list(values.values()))
    if len(v) < 2 or np.ptp(v) == 0:
        return dict.fromkeys(values, 0.0)
    made = (v - v.mean()) / ((v.std(ddof=1) + epsilon) if std else 1.0)
    return dict(zip(values, made.tolist(), strict=True))


def compared(found: dict[str, float | None], expected: dict[str, float | None]) -> None:
    assert set(found) == set(expected)
    assert {k for k, v in found.items() if v is None} == {
        k for k, v in expected.items() if v is None
    }
    for key, value in expected.items():
        assert found[key] == (value if value is None else pytest.approx(value, abs=1e-7))


@pytest.mark.parametrize("per_step", [False, True])
@settings(max_examples=20)
@given(groups=some_groups, seed=st.integers(0, 99))
def test_step_zscore_is_that_of_the_last_step_for_all_steps(
    groups: Groups, seed: int, *, per_step: bool
) -> None:
    expected: dict[str, float | None] = {}
    for g, rollouts in enumerate(groups):
        last = {i: s[-1][0] for i, s in enumerate(rollouts)}
        credit = normed({i: r for i, r in last.items() if r is not None}, std=True)
        for i, steps in enumerate(rollouts):
            share = len(steps) if per_step else 1
            for j in range(len(steps)):
                known = credit.get(i)
                expected[rollout_id(f"g{g}", i, j)] = None if known is None else known / share
    compared(found_by(step_zscore(per_step=per_step), groups, seed), expected)


@pytest.mark.parametrize("own_rewards", [False, True])
@pytest.mark.parametrize("normalize", ["none", "std"])
@settings(max_examples=20)
@given(groups=some_groups, seed=st.integers(0, 99))
def test_gigpo_is_the_credit_of_the_rollout_and_of_the_step_at_its_state(
    groups: Groups, seed: int, *, own_rewards: bool, normalize: Any
) -> None:
    gamma, omega, std = 0.5, 0.75, normalize == "std"
    expected: dict[str, float | None] = {}
    for g, rollouts in enumerate(groups):
        episodes: dict[int, float] = {}
        at_state: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
        for i, steps in enumerate(rollouts):
            rewards = [r for r, _ in steps]
            if not own_rewards:
                rewards = [0.0] * (len(steps) - 1) + rewards[-1:]
            if any(r is None for r in rewards):
                continue
            episodes[i] = sum(r for r in rewards if r is not None)
            for j, (_, state) in enumerate(steps):
                later = [gamma**k * (r or 0.0) for k, r in enumerate(rewards[j:])]
                if state is not None:
                    at_state[state][i, j] = sum(later)
        first = normed(episodes, std=std)
        second = {k: v for one in at_state.values() for k, v in normed(one, std=std).items()}
        for i, steps in enumerate(rollouts):
            for j in range(len(steps)):
                value = first[i] + omega * second.get((i, j), 0.0) if i in first else None
                expected[rollout_id(f"g{g}", i, j)] = value
    step_reward = "reward" if own_rewards else None
    op = gigpo(gamma=gamma, omega=omega, normalize=normalize, step_reward=step_reward)
    # sums that differ by rounding alone are divided by the epsilon at least
    compared(found_by(op, groups, seed), expected)


def test_steps_beyond_the_ninth_follow_it() -> None:
    steps: list[Step] = [*[(0.0, None)] * 11, (1.0, None)]
    found = found_by(step_zscore(epsilon=0.0), [[steps, [(0.0, None)]]], seed=1)
    assert {round(a, 3) for a in found.values() if a is not None} == {0.707, -0.707}
    assert found["g0/00.2"] == pytest.approx(0.7071, abs=1e-3)


def test_a_column_may_tell_the_order_of_steps() -> None:
    made = frame_of([[[(1.0, None), (0.0, None)], [(0.5, None)]]], seed=0)
    at = pl.when(pl.col("experience_id") == "g0/00").then(9).otherwise(1)
    credit = step_zscore(order="at")(made.with_columns(at=at)).sort("experience_id")["advantage"]
    assert credit.to_list()[0] > 0, "the first row comes last, and its reward is 1"


def test_rollouts_of_one_row_have_the_advantages_of_grpo() -> None:
    made = frame_of([[[(r, "s")] for r in (1.0, 0.0, None, 0.25)]], seed=3)
    assert step_zscore()(made)["advantage"].equals(group_zscore()(made)["advantage"])


def test_anchors_do_not_cross_tasks() -> None:
    here: list[list[Step]] = [[(1.0, "door")], [(0.0, "hall")]]
    found = found_by(gigpo(gamma=1.0), [here, [[(5.0, "door")]]], seed=0)
    assert found == {"g0/00": 0.5, "g0/01": -0.5, "g1/00": 0.0}


def test_the_same_steps_give_the_same_bits_in_any_order_and_engine() -> None:
    rng = np.random.default_rng(0)
    for seed in range(5):
        groups: Groups = [
            [[(float(r), "door") for r in rng.normal(size=3)] for _ in range(3)] for _ in range(2)
        ]
        for op in (gigpo(step_reward="reward", normalize="std"), step_zscore(per_step=True)):
            once = found_by(op, groups, seed)
            for engine in ("streaming", "in-memory"):
                again = op(frame_of(groups, seed + 1).lazy()).collect(engine=engine)
                assert dict(again.select("experience_id", "advantage").iter_rows()) == once


def caused(
    rewards: list[float | None], at: int, window: int | None, gamma: float | None
) -> float | None:
    """The return of one row, by its definition."""
    following = rewards[at : None if window is None else at + window]
    if any(reward is None for reward in following):
        return None
    weights = [1.0 if gamma is None else gamma**k for k in range(len(following))]
    total = math.fsum(w * r for w, r in zip(weights, following, strict=True) if r is not None)
    return total if gamma is not None else total / len(following)


@given(some_groups, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize(
    ("window", "gamma", "temperature"),
    [(None, None, None), (2, None, 0.5), (None, 0.9, 2.0), (1, 0.5, None)],
)
def test_a_row_is_credited_with_what_follows_it_less_the_mean_at_its_place(
    window: int | None, gamma: float | None, temperature: float | None, groups: Groups, seed: int
) -> None:
    mark = [{"name": "reward_discount", "value": 0.0}]
    frame = frame_of(groups, seed).with_columns(
        metrics=pl.lit(mark, pl.List(pl.Struct({"name": pl.String, "value": pl.Float64})))
    )
    op = causal_returns(window=window, gamma=gamma, temperature=temperature)
    found = dict(op(frame).select("experience_id", "advantage").iter_rows())
    for g, rollouts in enumerate(groups):
        own = [[reward for reward, _ in steps] for steps in rollouts]
        for i, steps in enumerate(own):
            for j in range(len(steps)):
                at_place = [caused(one, j, window, gamma) for one in own if j < len(one)]
                given_there = [value for value in at_place if value is not None]
                mine, said = caused(steps, j, window, gamma), found[rollout_id(f"g{g}", i, j)]
                if mine is None:
                    assert said is None
                    continue
                apart = mine - math.fsum(given_there) / len(given_there)
                weight = 1.0 if temperature is None else math.exp(apart / temperature)
                assert said == pytest.approx(apart * weight, rel=1e-9, abs=1e-12)
