"""Advantages against the formulas, computed independently in numpy with 64 bits."""

import numpy as np
import polars as pl
import pytest
from builders import experiences, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rlake.operators import Operator, group_zscore, leave_one_out

Groups = list[list[float | None]]

groups_of_rewards = st.lists(
    st.lists(
        st.none() | st.sampled_from([0.1, 0.3, 1.0]) | st.floats(-10, 10), min_size=1, max_size=6
    ),
    min_size=1,
    max_size=4,
)


def shuffled(groups: Groups, seed: int) -> pl.DataFrame:
    records = [
        one
        for g, rewards in enumerate(groups)
        for i, reward in enumerate(rewards)
        for one in experiences(1, reward=reward, experience_id=f"{g}/{i}", group_id=f"g{g}")
    ]
    return rows(records).sample(fraction=1.0, shuffle=True, seed=seed)


def check(groups: Groups, found: pl.DataFrame, expected: list[np.ndarray]) -> None:
    for g, rewards in enumerate(groups):
        advantages = dict(found.select("experience_id", "advantage").iter_rows())
        got = [advantages[f"{g}/{i}"] for i in range(len(rewards))]
        assert [a is None for a in got] == [r is None for r in rewards]
        np.testing.assert_allclose(
            [a for a in got if a is not None], expected[g], rtol=1e-9, atol=1e-9
        )


def scored(rewards: list[float | None]) -> np.ndarray:
    return np.array([r for r in rewards if r is not None], dtype=np.float64)


@settings(max_examples=50, deadline=None)
@given(groups=groups_of_rewards, seed=st.integers(0, 99))
def test_group_zscore_is_the_formula_of_grpo_with_the_sample_deviation(
    groups: Groups, seed: int
) -> None:
    expected = []
    for rewards in groups:
        r = scored(rewards)
        flat = len(r) < 2 or np.ptp(r) == 0
        expected.append(np.zeros(len(r)) if flat else (r - r.mean()) / (r.std(ddof=1) + 1e-6))
    check(groups, group_zscore()(shuffled(groups, seed)), expected)


@settings(max_examples=50, deadline=None)
@given(groups=groups_of_rewards, seed=st.integers(0, 99))
def test_leave_one_out_is_the_formula_of_rloo(groups: Groups, seed: int) -> None:
    expected = []
    for rewards in groups:
        r = scored(rewards)
        others = [np.delete(r, i).mean() if len(r) > 1 else r[i] for i in range(len(r))]
        expected.append(r - np.array(others))
    check(groups, leave_one_out()(shuffled(groups, seed)), expected)


@pytest.mark.parametrize("op", [group_zscore(), leave_one_out()], ids=str)
def test_equal_rewards_and_groups_of_one_give_exactly_zero(op: Operator) -> None:
    frame = shuffled([[0.1] * 7, [0.3]], seed=0)
    assert set(op(frame)["advantage"]) == {0.0}


@pytest.mark.parametrize("op", [group_zscore(), leave_one_out()], ids=str)
def test_the_same_rows_give_the_same_bits_in_any_order_and_engine(op: Operator) -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        groups: Groups = [[*rng.normal(size=5), None] for _ in range(3)]
        once = op(shuffled(groups, seed)).sort("experience_id")["advantage"].to_list()
        for engine in ("streaming", "in-memory"):
            again = op(shuffled(groups, seed + 1).lazy()).collect(engine=engine)
            assert again.sort("experience_id")["advantage"].to_list() == once
