"""Format, repetition and the surprise of tokens, against loops over each text and token."""

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.builders import table

from rlake.operators import format_score, repetition_score, surprise

GOOD = "<think>\n2 + 2 is 4\n</think>\n<answer>4</answer>\n"


def answered(*texts: str | None) -> pl.DataFrame:
    return table(
        {"experience_id": f"{i:02d}", "response_text": text} for i, text in enumerate(texts)
    )


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (GOOD, 1.0),
        ("<answer>4</answer><think>late</think>", 2 / 3),
        ("so: " + GOOD, 2 / 3),
        (GOOD + "<answer>5</answer>", 2 / 3),
        ("<think>no end <answer>4</answer>", 1 / 3),
        ("4", 0.0),
        ("", 0.0),
        (None, None),
    ],
)
def test_the_format_score_is_the_share_of_checks_passed(
    text: str | None, score: float | None
) -> None:
    [found] = format_score()(answered(text))["format_score"]
    assert found == (None if score is None else pytest.approx(score))


def test_patterns_are_checks_too() -> None:
    boxed = format_score(tags=[], patterns=[r"\\boxed\{.+\}", r"(?i)therefore"])
    found = boxed(answered(r"Therefore \boxed{4}", r"\boxed{4}", "4"))["format_score"]
    assert found.to_list() == [1.0, 0.5, 0.0]


def share_repeated(pieces: list[str] | list[int], n: int) -> float:
    grams = [tuple(pieces[i : i + n]) for i in range(len(pieces) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


words = st.lists(st.sampled_from(["a", "bb", "C", "."]), max_size=12).map(" ".join)


@settings(max_examples=60)
@given(texts=st.lists(st.none() | words, max_size=5), n=st.integers(1, 4))
@example(texts=["a a", "bb"], n=2)
def test_the_repetition_score_counts_ngrams_that_came_before(
    texts: list[str | None], n: int
) -> None:
    found = repetition_score(n=n)(answered(*texts))["repetition_score"].to_list()
    for text, score in zip(texts, found, strict=True):
        if text is None:
            assert score is None
        else:
            assert score == pytest.approx(share_repeated(text.lower().split(), n), abs=1e-12)


def sampled(*given: tuple[list[float], list[bool]] | None) -> pl.DataFrame:
    made = []
    for i, one in enumerate(given):
        logprobs, mask = one or (None, None)
        ids = None if mask is None else [j % 3 for j in range(len(mask))]
        made.append({"token_ids": ids, "loss_mask": mask, "logprobs": logprobs})
        made[-1]["experience_id"] = f"{i:02d}"
    return table(made)


tokens = st.integers(0, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-9, 0, width=32), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


@settings(max_examples=25)
@given(given_=st.lists(st.none() | tokens, max_size=5))
def test_surprise_is_that_of_the_sampled_tokens_alone(
    given_: list[tuple[list[float], list[bool]] | None],
) -> None:
    found = surprise()(sampled(*given_)).rows(named=True)
    for one, row in zip(given_, found, strict=True):
        kept = [-p for p, m in zip(*one, strict=True) if m] if one else []
        told = [row[name] for name in ("surprise", "surprise_max", "perplexity")]
        if not kept:
            assert told == [None, None, None]
            continue
        mean = float(np.mean(np.array(kept, np.float64)))
        assert told == pytest.approx([mean, max(kept), math.exp(mean)], rel=1e-12, abs=1e-12)


def test_a_log_prob_that_is_not_finite_is_no_surprise() -> None:
    frame = sampled(([-1.0, -5.0], [True, True]), ([-5.0, -1.0], [False, True]))
    broken = frame.with_columns(
        pl.col("logprobs").list.eval(
            pl.when(pl.element() > -5).then(pl.element()).otherwise(-math.inf)
        )
    )
    assert surprise()(broken)["surprise"].to_list() == [None, 1.0]


def test_log_probs_that_do_not_fit_the_mask_are_the_error_of_their_row() -> None:
    frame = sampled(([-1.0, -2.0], [True, True]), ([-1.0], [True]))
    cut = frame.with_columns(
        loss_mask=pl.when(pl.col("experience_id") == "00")
        .then(pl.col("loss_mask").list.head(1))
        .otherwise("loss_mask")
    )
    applied = surprise().apply(cut)
    assert applied.rows["surprise"].to_list() == [None, 1.0]
    [(name, error)] = applied.failed.rows()
    assert name == "00"
    assert "`logprobs` has 2 values and `loss_mask` 1, expected one a token" in error


def test_repetition_of_tokens_counts_what_was_sampled() -> None:
    mask = [True, False, False, True, True, True]  # tokens 0, 0, 1, 2
    frame = sampled(([-1.0] * 6, mask), None)
    found = repetition_score(n=1, of="tokens")(frame)["repetition_score"].to_list()
    assert found == [0.25, None]
