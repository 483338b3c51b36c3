"""From rows to micro-batches: nothing is lost, nothing is over budget, and errors name the row."""

from itertools import pairwise
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.builders import rows
from support.tiny_models import written

from rlake.loop.losses.batch import Batch, Examples, Totals, examples, untrainable
from rlake.loop.trainer.micro_batches import plan_micro_batches
from rlake.store.errors import JobError


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_and_keep_within_the_budget(
    lengths: list[int], max_tokens: int
) -> None:
    groups = plan_micro_batches(lengths, max_tokens)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(lengths[i] for i in group)
        assert padded <= max_tokens or len(group) == 1


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(60, 400))
def test_rows_of_similar_length_are_together(lengths: list[int], max_tokens: int) -> None:
    ends = [(lengths[g[0]], lengths[g[-1]]) for g in plan_micro_batches(lengths, max_tokens)]
    assert all(before[1] >= after[0] for before, after in pairwise(ends))


def test_rows_that_fit_together_are_one_micro_batch() -> None:
    assert len(plan_micro_batches([5] * 8, 40)) == 1
    assert len(plan_micro_batches([5] * 8, 39)) == 2


def frame(**columns: Any) -> pl.DataFrame:
    """Three rows as the feed hands them over."""
    made = written(3, response=[3, 1, 5], **columns)
    return rows(made).with_columns(
        advantage=pl.Series([0.5, None, -1.0]), weight=pl.Series([1.0, 2.0, 0.5])
    )


def batches(rows: Examples, *, max_tokens: int = 1000, pad_id: int = 0) -> list[Batch]:
    return [
        rows.padded(places, totals=rows.totals, pad_id=pad_id)
        for places in plan_micro_batches(rows.lengths.tolist(), max_tokens)
    ]


def test_columns_become_aligned_tensors_padded_on_the_right() -> None:
    [batch] = batches(examples(frame(), needs=frozenset({"logprobs"})), pad_id=9)
    assert batch.token_ids_BT.tolist() == [
        [5, 13, 5, 6, 7, 8, 9],
        [3, 13, 3, 4, 5, 9, 9],
        [4, 13, 4, 9, 9, 9, 9],
    ]
    assert batch.mask_BT.tolist() == [
        [0, 0, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
    ]
    expected = [-1.0, -1.1, -1.2, -1.3, -1.4]
    torch.testing.assert_close(batch.logprobs_BT[0], torch.tensor([0.0, 0.0, *expected]))
    torch.testing.assert_close(
        batch.logprobs_BT[1], torch.tensor([0.0, 0.0, *expected[:3], 0.0, 0.0])
    )
    assert batch.rows["advantage"].tolist() == [-1.0, 0.5, 0.0]
    assert batch.weight_B.tolist() == [0.5, 1.0, 2.0]
    assert batch.totals == Totals(9, 3, 3)
    assert batch.advantage_BT.tolist()[0] == [0, 0, -1, -1, -1, -1, -1]


def test_the_totals_of_each_part_are_those_of_the_step() -> None:
    parts = batches(examples(frame(), needs=frozenset({"logprobs"})), max_tokens=1)
    assert [tuple(p.token_ids_BT.shape) for p in parts] == [(1, 7), (1, 5), (1, 3)]
    assert {p.totals for p in parts} == {Totals(9, 3, 3)}


def test_the_first_token_is_never_trained_on_and_never_counted() -> None:
    made = written(2, response=2, loss_mask=[True, False, True, True])
    ready = rows(made).with_columns(advantage=pl.lit(1.0), weight=pl.lit(1.0))
    [batch] = batches(examples(ready))
    assert batch.mask_BT.tolist() == [[0, 0, 1, 1]] * 2
    assert batch.totals.tokens == float(batch.mask_BT.sum()) == 4


def test_rows_without_one_trained_token_make_a_batch_of_zeros_and_no_division_by_zero() -> None:
    ready = rows(written(1, response=1, loss_mask=[False] * 3)).with_columns(
        advantage=pl.lit(1.0), weight=pl.lit(1.0)
    )
    [batch] = batches(examples(ready))
    assert batch.mask_BT.sum() == 0
    assert torch.isfinite(batch.token_mean(torch.ones(1, 3)))


def test_logprobs_that_are_not_needed_are_not_asked_for() -> None:
    ready = examples(frame(logprobs=None))
    assert "logprobs" not in ready.tokens


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"logprobs": None}, r"experience `g000/00` has no logprobs.*trainer.where"),
        ({"loss_mask": None}, r"experience `g000/00` has token_ids but no loss_mask"),
    ],
)
def test_a_row_that_misses_something_is_named(missing: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        examples(frame(**missing), needs=frozenset({"logprobs"}))


@pytest.mark.parametrize(
    ("token_ids", "loss_mask", "good"),
    [
        ([3, 4, 5], [False, True, True], True),
        ([3, 4, 9], [False, True, True], True),
        ([3, 4, 10], [False, True, True], False),
        ([3, -1, 5], [False, True, True], False),
        ([3, None, 5], [False, True, True], False),
        ([3, 4, 5], [False, None, True], False),
        ([3, 4, 5], [False, True], False),
        ([3, 4, 5], None, False),
        (None, [False, True, True], False),
        (None, None, False),
        ([], [], False),
        ([3] * 5, [True] * 5, True),
        ([3] * 6, [True] * 6, False),
    ],
)
def test_a_row_that_the_model_cannot_take_is_told_apart(
    token_ids: Any, loss_mask: Any, good: Any
) -> None:
    frame = pl.DataFrame(
        {"token_ids": [[1, 2], token_ids], "loss_mask": [[True, True], loss_mask]},
        schema={"token_ids": pl.List(pl.Int32), "loss_mask": pl.List(pl.Boolean)},
    )
    assert untrainable(frame, vocabulary=10, max_length=5).is_null().to_list() == [True, good]


def test_without_limits_any_length_and_token_will_do() -> None:
    made = rows(written(2, response=[500, 3]))
    assert untrainable(made, vocabulary=None, max_length=None).is_null().to_list() == [True, True]
    assert untrainable(made, vocabulary=None, max_length=100).is_null().to_list() == [False, True]
    assert untrainable(made.clear(), vocabulary=10, max_length=9).is_null().to_list() == []
