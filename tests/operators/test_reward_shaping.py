"""Pass rates, penalties of length and shaped rewards, against loops in numpy."""

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import table

from rlake.operators import (
    group_statistics,
    length_penalty,
    overlong_penalty,
    pass_rate,
    shape_reward,
    unlikeliness_reward,
)
from rlake.store.errors import OperatorError

Row = tuple[float | None, int | None]
"""A reward, and how many tokens were sampled."""

one_row = st.tuples(st.none() | st.sampled_from([0.0, 1.0, 0.25]), st.none() | st.integers(1, 9))
some_groups = st.lists(st.lists(one_row, min_size=1, max_size=5), min_size=1, max_size=3)


def frame_of(groups: list[list[Row]], seed: int = 0) -> pl.DataFrame:
    made = []
    for g, group in enumerate(groups):
        for i, (reward, length) in enumerate(group):
            values: dict[str, Any] = {"experience_id": f"{g}/{i}", "group_id": f"g{g}"}
            if length is not None:
                # the log-probs of the prompt do not count
                own = [-0.1 * (1 + (7 * g + 3 * i + t) % 5) for t in range(length)]
                values |= {
                    "token_ids": [1] * (length + 2),
                    "loss_mask": [False, False] + [True] * length,
                    "logprobs": [-9.0, 0.0, *own],
                }
            named = [] if reward is None else [("accuracy", reward), ("format", 0.5)]
            made.append(values | {"reward": reward, "rewards": dict(named)})
    return table(made).sample(fraction=1.0, shuffle=True, seed=seed)


def column_of(frame: pl.DataFrame, name: str) -> dict[str, Any]:
    return dict(frame.select("experience_id", name).iter_rows())


def compared(found: dict[str, Any], expected: dict[str, float | None]) -> None:
    assert {k: None if v is None else pytest.approx(v, abs=1e-12) for k, v in expected.items()} == (
        found
    )


# built once: to parse SQL takes longer than to run it
LOWERED = shape_reward(formula="reward - 10")
PASS_RATE, BY_ACCURACY = pass_rate(), pass_rate(accuracy="rewards['accuracy']")


@settings(max_examples=15)
@given(groups=some_groups, seed=st.integers(0, 9))
def test_the_pass_rate_is_the_share_of_known_answers_above_the_threshold(
    groups: list[list[Row]], seed: int
) -> None:
    expected = {}
    for g, group in enumerate(groups):
        passed = [float(r > 0.5) for r, _ in group if r is not None]
        rate = float(np.mean(passed)) if passed else None
        expected |= {f"{g}/{i}": rate for i in range(len(group))}
    frame = frame_of(groups, seed)
    compared(column_of(PASS_RATE(frame), "pass_rate"), expected)
    compared(column_of(BY_ACCURACY(LOWERED(frame)), "pass_rate"), expected)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_reward_that_is_no_finite_number_does_not_pass(odd: float) -> None:
    frame = frame_of([[(1.0, 2), (0.0, 3), (None, 4)]])
    given = frame.with_columns(pl.col("reward").fill_null(odd))
    for op in (PASS_RATE, group_statistics(), length_penalty()):
        assert op(given).select(op.writes).equals(op(frame).select(op.writes))


@settings(max_examples=20)
@given(groups=some_groups, seed=st.integers(0, 9))
def test_group_statistics_are_those_of_numpy(groups: list[list[Row]], seed: int) -> None:
    found = group_statistics()(frame_of(groups, seed))
    for g, group in enumerate(groups):
        r = np.array([r for r, _ in group if r is not None])
        expected = {
            "group_mean": float(r.mean()) if len(r) else None,
            "group_std": float(r.std(ddof=1)) if len(r) > 1 else None,
            "group_min": float(r.min()) if len(r) else None,
            "group_max": float(r.max()) if len(r) else None,
        }
        for row in found.filter(group_id=f"g{g}").rows(named=True):
            told = {name: row[name] for name in expected}
            assert told == pytest.approx(expected, abs=1e-12)


@settings(max_examples=20)
@given(groups=some_groups, seed=st.integers(0, 9))
def test_the_length_penalty_is_that_of_kimi(groups: list[list[Row]], seed: int) -> None:
    expected: dict[str, float | None] = {}
    for g, group in enumerate(groups):
        lengths = [n for _, n in group if n is not None]
        for i, (reward, n) in enumerate(group):
            if reward is None or n is None:
                expected[f"{g}/{i}"] = None
                continue
            low, high = min(lengths), max(lengths)
            share = 0.0 if low == high else 0.5 - (n - low) / (high - low)
            expected[f"{g}/{i}"] = share if reward > 0.5 else min(0.0, share)
    compared(column_of(length_penalty()(frame_of(groups, seed)), "length_penalty"), expected)


def test_the_overlong_penalty_is_equation_13_of_dapo() -> None:
    lengths = [1, 6, 7, 8, 9, 10, 11, 50, None]
    expected: list[float | None] = []
    for n in lengths:
        if n is None:
            expected.append(None)
        elif n <= 10 - 4:
            expected.append(0.0)
        else:
            expected.append(((10 - 4) - n) / 4 if n <= 10 else -1.0)
    found = overlong_penalty(max_tokens=10, cache=4)(frame_of([[(1.0, n) for n in lengths]]))
    compared(
        column_of(found, "overlong_penalty"), {f"0/{i}": value for i, value in enumerate(expected)}
    )


@settings(max_examples=20)
@given(groups=some_groups, seed=st.integers(0, 9))
def test_the_unlikeliness_reward_lowers_what_is_likely_by_its_rank(
    groups: list[list[Row]], seed: int
) -> None:
    frame = frame_of(groups, seed)
    stored = {r["experience_id"]: r for r in frame.to_dicts()}
    expected: dict[str, float | None] = {}
    for g, group in enumerate(groups):
        likely = {}
        for i, (_, n) in enumerate(group):
            row = stored[f"{g}/{i}"]
            if n is not None:
                likely[f"{g}/{i}"] = sum(np.array(row["logprobs"], np.float32)[2:].astype(float))
        ranked = sorted(likely, key=lambda name: (-likely[name], name))
        for i, (reward, n) in enumerate(group):
            name = f"{g}/{i}"
            if reward is None or n is None:
                expected[name] = None
                continue
            share = (len(ranked) - ranked.index(name)) / len(ranked)
            expected[name] = reward * (1 - 0.4 * share) if reward > 0 else reward
    compared(column_of(unlikeliness_reward(penalty=0.4)(frame), "reward"), expected)


def test_a_formula_reads_columns_and_parts_by_name_and_null_stays_null() -> None:
    frame = frame_of([[(1.0, 2), (0.0, 2), (None, 2), (0.25, None)]])
    formula = "reward + 0.1 * rewards['format'] - 0.01 * list_sum(loss_mask::INT[])"
    expected = {"0/0": 1.03, "0/1": 0.03, "0/2": None, "0/3": None}
    compared(column_of(shape_reward(formula=formula)(frame), "reward"), expected)
    missing = shape_reward(formula="coalesce(rewards['style'], -1)")
    assert set(missing(frame)["reward"]) == {-1.0}


def test_a_reward_that_is_not_finite_is_the_error_of_its_row() -> None:
    frame = frame_of([[(1.0, 2), (0.0, 2), (None, 2)]])
    applied = shape_reward(formula="1 / reward").apply(frame)
    assert column_of(applied.rows, "reward") == {"0/0": 1.0, "0/1": None, "0/2": None}
    [(failed, error)] = applied.failed.rows()
    assert failed == "0/1"
    assert "the reward is inf, expected a finite number or NULL" in error


def test_a_column_that_is_not_there_is_named() -> None:
    frame = frame_of([[(1.0, 2)]])
    with pytest.raises(OperatorError, match="rewrad"):
        shape_reward(formula="rewrad * 2")(frame)
