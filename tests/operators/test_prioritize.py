"""Priorities against loops, and in the draws of a trainer."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import table

from rlake.operators import (
    absolute_advantage,
    embedding,
    freshness,
    near_half,
    novelty,
    priority,
    rarity,
    td_error,
)
from rlake.operators.embed import hashed_ngrams
from rlake.store.errors import OperatorError

some_rewards = st.lists(
    st.lists(st.none() | st.sampled_from([0.0, 1.0, 0.25]), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


def frame_of(**columns: list[Any]) -> pl.DataFrame:
    """Make rows with these columns, called 00, 01 and so on."""
    values = zip(*columns.values(), strict=True)
    each = (dict(zip(columns, one, strict=True)) for one in values)
    return table({"experience_id": f"{i:02d}", **one} for i, one in enumerate(each))


def priorities(frame: pl.DataFrame) -> list[float | None]:
    return frame.sort("experience_id")["priority"].to_list()


def test_a_row_of_one_half_life_counts_half() -> None:
    frame = frame_of(policy_version=[6, 4, 0, None, 9])
    assert priorities(freshness(half_life=2.0, newest=6)(frame)) == [1.0, 0.5, 0.125, None, 1.0]
    expected = [0.5 ** ((9 - v) / 3) for v in (6, 4, 0)]
    assert priorities(freshness(half_life=3.0)(frame)) == [*map(pytest.approx, expected), None, 1.0]


def test_freshness_counts_batches_and_seconds_too() -> None:
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    frame = frame_of(batch=[3, 1]).with_columns(
        created_at=pl.Series([noon, noon - timedelta(seconds=90)])
    )
    assert priorities(freshness(half_life=1.0, by="batch")(frame)) == [1.0, 0.25]
    by_time = freshness(half_life=90.0, by="created_at")
    assert priorities(by_time(frame)) == [1.0, 0.5]
    later = freshness(half_life=90.0, by="created_at", newest="2026-01-31T12:01:30+00:00")
    assert priorities(later(frame)) == [0.5, 0.25]
    without_zone = freshness(half_life=90.0, by="created_at", newest="2026-01-31T12:01:30")
    assert priorities(without_zone(frame)) == [0.5, 0.25], "a time without a zone is UTC"


def test_errors_are_absolute_and_null_stays_null() -> None:
    frame = frame_of(advantage=[-0.5, 0.25, None], reward=[1.0, None, 0.0])
    assert priorities(absolute_advantage()(frame)) == [0.5, 0.25, None]
    assert priorities(td_error(prediction="reward", epsilon=0.5)(frame)) == [2.0, None, None]


@settings(max_examples=15)
@given(groups=some_rewards)
def test_near_half_is_the_variance_of_a_pass(groups: list[list[float | None]]) -> None:
    flat = [(g, r) for g, rewards in enumerate(groups) for r in rewards]
    frame = frame_of(group_id=[f"g{g}" for g, _ in flat], reward=[r for _, r in flat])
    expected = []
    for g, _ in flat:
        passed = [r > 0.5 for r in groups[g] if r is not None]
        p = float(np.mean(passed)) if passed else None
        expected.append(None if p is None else pytest.approx(4 * p * (1 - p), abs=1e-12))
    assert priorities(NEAR_HALF(frame)) == expected


NEAR_HALF = near_half()


def test_what_many_gave_is_less_rare() -> None:
    frame = frame_of(
        response_text=["4", "4", "5", "4", None],
        group_id=["g", "g", "g", "h", "h"],
        task_id=["t"] * 5,
    )
    assert priorities(rarity()(frame)) == [0.5, 0.5, 1.0, 1.0, None]
    third = pytest.approx(1 / 3)
    assert priorities(rarity(within="task_id")(frame)) == [third, third, 1.0, third, None]


TEXTS = ["carry the one", "Carry the one!", "count on fingers", None, " ", "carry a one", "none"]


def test_novelty_is_the_distance_to_the_nearest_other_of_the_task() -> None:
    tasks = ["t", "t", "t", "t", "t", "t", "alone"]
    frame = frame_of(response_text=TEXTS, task_id=tasks)
    vectors = hashed_ngrams([text or "" for text in TEXTS]).astype(np.float64)
    known = [i for i, text in enumerate(TEXTS) if text and text.strip()]
    expected: list[Any] = [None] * len(TEXTS)
    for i in known:
        others = [j for j in known if j != i and tasks[j] == tasks[i]]
        cosines = [vectors[i] @ vectors[j] for j in others]
        expected[i] = pytest.approx(1 - max([0.0, *cosines]), abs=1e-6)
    assert priorities(novelty()(frame)) == expected
    by_vector = novelty(column="vector")(embedding()(frame))
    assert priorities(by_vector) == expected


def lengths(texts: Sequence[str]) -> np.ndarray:
    if "carry a one" in texts:
        raise RuntimeError("this one is too much")
    return np.array([[len(text), 1.0] for text in texts])


def test_a_text_that_cannot_be_embedded_is_the_error_of_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    frame = frame_of(response_text=TEXTS)
    applied = embedding(embedder="mine:lengths").apply(frame)
    assert applied.failed["experience_id"].to_list() == ["05"]
    assert "RuntimeError: this one is too much" in applied.failed["error"][0]
    found = applied.rows.sort("experience_id")
    assert found["vector"].to_list() == [[13, 1], [14, 1], [16, 1], None, None, None, [4, 1]]
    assert {e.partition("@")[0] for e in found["embedder"].drop_nulls()} == {"mine:lengths"}
    assert found["embedder"].null_count() == 3


def test_vectors_are_those_of_the_embedder() -> None:
    found = embedding()(frame_of(response_text=TEXTS))["vector"].drop_nulls().to_list()
    texts = [text for text in TEXTS if text and text.strip()]
    assert np.array_equal(np.array(found, np.float32), hashed_ngrams(texts))


def test_novelty_has_the_same_bits_whatever_other_rows_there_are() -> None:
    rng = np.random.default_rng(0)
    one = rng.normal(size=(30, 900))
    alike = np.stack([one, one + 0.1 * rng.normal(size=one.shape)], axis=1).reshape(60, 900)
    vectors = pl.Series(alike.astype(np.float32)).cast(pl.List(pl.Float32))
    frame = frame_of(task_id=["t"] * 60).with_columns(vector=vectors)
    op = novelty(column="vector")
    once = priorities(op(frame))
    for seed in range(3):
        assert priorities(op(frame.sample(fraction=1.0, shuffle=True, seed=seed))) == once
    for i in range(0, 60, 2):
        assert priorities(op(frame[i : i + 2])) == once[i : i + 2], "each is nearest to its twin"
    assert priorities(op(frame[:1])) == [1.0], "alone"


def test_a_vector_that_is_not_finite_is_like_nothing_and_spoils_no_other() -> None:
    frame = frame_of(task_id=["t"] * 4).with_columns(
        vector=pl.Series([[1.0, 0.0], [float("nan"), 1.0], [0.0, None], [3.0, 0.0]])
    )
    assert priorities(novelty(column="vector")(frame)) == [0.0, None, None, 0.0]


def test_vectors_of_two_lengths_are_not_compared() -> None:
    frame = frame_of(task_id=["t", "t"]).with_columns(vector=pl.Series([[1.0], [1.0, 2.0]]))
    with pytest.raises(OperatorError, match="vectors of 1 and of 2 numbers are compared"):
        novelty(column="vector")(frame)


def test_priorities_are_weighed_against_each_other_by_a_formula() -> None:
    frame = frame_of(
        policy_version=[4, 2], advantage=[0.5, -1.0], metrics=[{"seconds": 2.0}, {"seconds": 4.0}]
    )
    weighed = (
        frame.pipe(freshness(half_life=2.0, into="fresh"))
        .pipe(absolute_advantage(into="size"))
        .pipe(priority(expression="fresh * size / metrics['seconds']"))
    )
    assert priorities(weighed) == [0.25, 0.125]
    assert weighed["fresh"].to_list() == [1.0, 0.5]
