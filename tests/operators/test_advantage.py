"""Advantages against the formulas, computed independently in numpy with 64 bits."""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import table

from rlake import operators as o
from rlake.operators import Operator

Groups = Sequence[Sequence[float | None]]
Formula = Callable[[list[np.ndarray]], list[np.ndarray]]

# no two so near that rounding decides, as between a mean and a reward that equals it
one_reward = (
    st.none() | st.sampled_from([0.1, 0.3, 1.0]) | st.floats(-10, 10).map(lambda x: round(x, 3))
)
groups_of_rewards = st.lists(st.lists(one_reward, min_size=1, max_size=6), min_size=1, max_size=4)


def tokens(group: int, place: int) -> int:
    """How many tokens a row of the tests was sampled with."""
    return 1 + (3 * group + place) % 4


def shuffled(groups: Groups, seed: int) -> pl.DataFrame:
    records = (
        {
            "reward": reward,
            "experience_id": f"{g}/{i}",
            "group_id": f"g{g}",
            "token_ids": [7] * (tokens(g, i) + 1),
            "loss_mask": [False] + [True] * tokens(g, i),
        }
        for g, rewards in enumerate(groups)
        for i, reward in enumerate(rewards)
    )
    made = table(records).with_columns(greedy=pl.lit(0.25))
    return made.sample(fraction=1.0, shuffle=True, seed=seed)


def check(groups: Groups, found: pl.DataFrame, expected: list[np.ndarray]) -> None:
    for g, rewards in enumerate(groups):
        advantages = dict(found.select("experience_id", "advantage").iter_rows())
        got = [advantages[f"{g}/{i}"] for i in range(len(rewards))]
        assert [a is None for a in got] == [r is None for r in rewards]
        np.testing.assert_allclose(
            [a for a in got if a is not None], expected[g], rtol=1e-9, atol=1e-9
        )


def scored(rewards: Sequence[float | None]) -> np.ndarray:
    return np.array([r for r in rewards if r is not None], dtype=np.float64)


def is_flat(r: np.ndarray) -> bool:
    return len(r) < 2 or float(np.ptp(r)) == 0


def by_group(formula: Callable[[np.ndarray], np.ndarray]) -> Formula:
    """Apply a formula to each group's rewards; 0 where they do not differ."""
    return lambda groups: [np.zeros(len(r)) if is_flat(r) else formula(r) for r in groups]


def minus_mean(r: np.ndarray) -> np.ndarray:
    return r - r.sum() / max(len(r), 1)


def minus_others(r: np.ndarray) -> np.ndarray:
    return r - np.array([np.delete(r, i).mean() for i in range(len(r))])


def minus_log_mean_exp(r: np.ndarray) -> np.ndarray:
    return r - 0.5 * np.log(np.mean(np.exp(r / 0.5)))


def over_batch_std(groups: list[np.ndarray]) -> list[np.ndarray]:
    every = np.concatenate(groups)
    return [
        np.zeros(len(r)) if is_flat(r) else (r - r.mean()) / (every.std(ddof=1) + 1e-6)
        for r in groups
    ]


def normalized(groups: list[np.ndarray]) -> list[np.ndarray]:
    every = np.concatenate(groups)
    if is_flat(every):
        return [np.zeros(len(r)) for r in groups]
    return [(r - every.mean()) / (every.std(ddof=1) + 1e-8) for r in groups]


def normalized_by_token(groups: Groups) -> list[np.ndarray]:
    times = [
        np.array([tokens(g, i) for i, r in enumerate(rewards) if r is not None], np.int64)
        for g, rewards in enumerate(groups)
    ]
    every = np.concatenate([np.repeat(scored(r), n) for r, n in zip(groups, times, strict=True)])
    if is_flat(every):
        return [np.zeros(len(scored(r))) for r in groups]
    return [(scored(r) - every.mean()) / (every.std(ddof=1) + 1e-8) for r in groups]


def best_of(k: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the formula of pass@k training, by looking at each set of k answers."""

    def formula(r: np.ndarray) -> np.ndarray:
        if len(r) < k:
            return np.zeros(len(r))
        sets = list(combinations(range(len(r)), k))
        rewards = np.array([float(any(r[i] > 0.5 for i in one)) for one in sets])
        if np.ptp(rewards) == 0:
            return np.zeros(len(r))
        z = (rewards - rewards.mean()) / rewards.std()
        return np.array(
            [np.mean([z[j] for j, one in enumerate(sets) if i in one]) for i in range(len(r))]
        )

    return formula


def over_pass_rate(r: np.ndarray) -> np.ndarray:
    passed = (r > 0.5).astype(np.float64)
    return np.zeros(len(r)) if not passed.any() else (passed - passed.mean()) / passed.mean()


FORMULAS: list[tuple[Operator, Formula]] = [
    (o.group_zscore(), by_group(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6))),
    (o.group_zscore(std="batch"), over_batch_std),
    (o.group_centered(), by_group(lambda r: r - r.mean())),
    (
        o.group_centered(shift=-0.1),
        lambda groups: [r - (r.sum() / max(len(r), 1) - 0.1) for r in groups],
    ),
    (o.leave_one_out(), by_group(minus_others)),
    (o.log_mean_exp(tau=0.5), by_group(minus_log_mean_exp)),
    (o.reinforce(), lambda groups: groups),
    (o.reinforce(baseline=0.5), lambda groups: [r - 0.5 for r in groups]),
    (
        o.reinforce(baseline="batch_mean"),
        lambda groups: [r - np.concatenate(groups).mean() for r in groups],
    ),
    (o.greedy_baseline(baseline="greedy"), lambda groups: [r - 0.25 for r in groups]),
    (o.batch_zscore(), normalized),
    (
        o.centered_batch_zscore(),
        lambda groups: normalized(by_group(lambda r: r - r.mean())(groups)),
    ),
    (o.balanced(drop="none"), by_group(lambda r: r - r.mean())),
    (
        o.balanced(drop="none", normalize="std"),
        by_group(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6)),
    ),
    (o.max_rl(), by_group(over_pass_rate)),
    (o.pass_at_k(k=1), by_group(best_of(1))),
    (o.pass_at_k(k=3), by_group(best_of(3))),
]


@pytest.mark.parametrize(("op", "formula"), FORMULAS, ids=[str(op) for op, _ in FORMULAS])
@settings(max_examples=12)
@given(groups=groups_of_rewards, seed=st.integers(0, 99))
def test_advantages_are_the_formulas_of_the_papers(
    op: Operator, formula: Formula, groups: Groups, seed: int
) -> None:
    found = op(shuffled(groups, seed))
    with np.errstate(all="ignore"):
        expected = (
            formula([scored(r) for r in groups]) if any(map(len, map(scored, groups))) else []
        )
    check(groups, found, expected or [np.array([]) for _ in groups])


@settings(max_examples=12)
@given(groups=groups_of_rewards, seed=st.integers(0, 99))
def test_rows_may_count_as_often_as_they_have_tokens(groups: Groups, seed: int) -> None:
    found = o.batch_zscore(per="token")(shuffled(groups, seed))
    check(groups, found, normalized_by_token(groups))


def test_a_row_without_tokens_is_left_out_where_tokens_count() -> None:
    frame = shuffled([[1.0, 0.0, 5.0]], seed=0)
    cut = frame.with_columns(
        loss_mask=pl.when(pl.col("experience_id") != "0/2").then(pl.col("loss_mask"))
    )
    credit = dict(o.batch_zscore(per="token")(cut).select("experience_id", "advantage").rows())
    assert credit["0/2"] is None
    assert credit["0/0"] == pytest.approx((1 - 1 / 3) / np.std([1, 0, 0], ddof=1), rel=1e-6)


@pytest.mark.parametrize(
    "op", [op for op, _ in FORMULAS if "shift=-" not in str(op) and op.whole_groups], ids=str
)
def test_equal_rewards_and_groups_of_one_give_exactly_zero(op: Operator) -> None:
    frame = shuffled([[0.1] * 7, [0.3]], seed=0)
    assert {str(a) for a in op(frame)["advantage"]} == {"0.0"}, "not -0.0"


EVERY = [*(op for op, _ in FORMULAS), o.batch_zscore(per="token"), o.balanced(), o.step_zscore()]


@pytest.mark.parametrize("op", EVERY, ids=str)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_no_finite_number_counts_as_none(op: Operator, odd: float) -> None:
    groups = [[1.0, 0.2, None, 0.7], [None, 1.0, 0.0]]
    without = shuffled(groups, seed=1)
    given = without.with_columns(pl.col("reward").fill_null(odd))
    assert op(given)["advantage"].equals(op(without)["advantage"])


@pytest.mark.parametrize("op", EVERY, ids=str)
def test_the_same_rows_give_the_same_bits_in_any_order_and_engine(op: Operator) -> None:
    rng = np.random.default_rng(0)
    for seed in range(4):
        # of one group, engines take what they divide by for one number
        groups: Groups = [[*rng.normal(size=4), None] for _ in range(1 + seed % 3)]
        once = op(shuffled(groups, seed)).sort("experience_id")["advantage"].to_list()
        for engine in ("streaming", "in-memory"):
            again = op(shuffled(groups, seed + 1).lazy()).collect(engine=engine)
            assert again.sort("experience_id")["advantage"].to_list() == once


# whole numbers, of which a mean is exact
whole_rewards = st.lists(st.none() | st.integers(-3, 3).map(float), min_size=1, max_size=8)


@pytest.mark.parametrize("normalize", ["none", "std"])
@settings(max_examples=20)
@given(rewards=whole_rewards, seed=st.integers(0, 99))
def test_balanced_keeps_as_many_low_answers_as_others(
    normalize: str, rewards: list[float | None], seed: int
) -> None:
    found = o.balanced(normalize=normalize, seed=seed)(shuffled([rewards], seed))  # pyright: ignore[reportArgumentType]
    credit = dict(found.select("experience_id", "advantage").iter_rows())
    known = {f"0/{i}": r for i, r in enumerate(rewards) if r is not None}
    assert {i for i, a in credit.items() if a is not None} == set(known)
    mean = np.mean(list(known.values())) if known else 0.0
    low = [i for i, r in known.items() if r < mean]
    others = [i for i, r in known.items() if r >= mean]
    zero = {i for i in low if credit[i] == 0.0}
    assert len(zero) == max(0, len(low) - len(others)) or is_flat(scored(rewards))
    kept = {i: r for i, r in known.items() if i not in zero}
    r = np.array(list(kept.values()))
    std = r.std(ddof=1) + 1e-6 if normalize == "std" and len(r) > 1 else 1.0
    expected = np.zeros(len(r)) if is_flat(r) else (r - r.mean()) / std
    np.testing.assert_allclose([credit[i] for i in kept], expected, rtol=1e-9, atol=1e-9)


def test_the_lot_of_balanced_depends_on_seed_and_id_alone() -> None:
    frame = shuffled([[1.0, *[0.0] * 7]], seed=0)

    def kept(seed: int, rows: pl.DataFrame) -> set[str]:
        made = o.balanced(seed=seed)(rows).filter(pl.col("advantage") < 0)
        return set(made["experience_id"])

    chosen = [kept(seed, frame) for seed in range(8)]
    assert chosen == [kept(seed, frame.reverse()) for seed in range(8)]
    assert {len(one) for one in chosen} == {1}
    assert len(set().union(*chosen)) > 2, "seeds choose differently"
