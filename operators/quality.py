"""Quality of a text by its form: is it built as asked, does it repeat itself."""

import re
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa

from ..store.errors import OperatorError, message_of
from .body import Batches, Declared
from .decorator import operator
from .parameters import Count


@operator("derive")
def format_score(
    *,
    tags: list[str] = ["think", "answer"],  # noqa: B006 - read, never changed
    patterns: list[str] = [],  # noqa: B006
    column: str = "response_text",
) -> pl.Expr:
    """Set `format_score` to the share of checks of its form that a text passes, from 0 to 1.

    One check for each of `tags`: it opens once and closes once. If there are tags, one that they
    make up the whole text in that order, with nothing but space around and between. One for each
    of `patterns`: the regular expression is found in the text (Rust's syntax, without
    look-around). NULL for a text that is NULL.

    >>> good, bad = "<think>2 + 2</think>\\n<answer>4</answer>", "<answer>4</answer>"
    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "response_text": [good, bad]})
    >>> rows.pipe(format_score())["format_score"].round(2).to_list()
    [1.0, 0.33]
    """
    if not tags and not patterns:
        raise OperatorError("`format_score` needs `tags` or `patterns`, got neither")
    text = pl.col(column)
    checks = [_is_once(text, f"<{t}>") & _is_once(text, f"</{t}>") for t in tags]
    whole = r"\s*".join(f"<{re.escape(t)}>.*?</{re.escape(t)}>" for t in tags)
    wanted = [rf"(?s)\A\s*{whole}\s*\z"] if tags else []
    checks += [text.str.contains(_checked(p)) for p in (*wanted, *patterns)]
    passed = pl.sum_horizontal(c.cast(pl.Float64) for c in checks) / len(checks)
    return pl.when(text.is_not_null()).then(passed).alias("format_score")


def _is_once(text: pl.Expr, mark: str) -> pl.Expr:
    return text.str.count_matches(mark, literal=True) == 1


def _checked(pattern: str) -> str:
    try:
        pl.Series([""]).str.contains(pattern)
    except pl.exceptions.ComputeError as error:
        raise OperatorError(
            f"`patterns` of `format_score` holds {pattern!r}: {message_of(error)}"
        ) from error
    return pattern


@operator("derive", writes=("repetition_score",))
def repetition_score(
    *, n: Count = 3, of: Literal["words", "tokens"] = "words", column: str = "response_text"
) -> Declared:
    """Set `repetition_score` to the share of n-grams of a text that came before in it.

    1 - (different n-grams) / (all n-grams), from 0: nothing repeats (arXiv:2502.03373 penalizes
    repeated n-grams). Of words (runs of letters and digits, and single signs) without regard to
    case; or, with `of="tokens"`, of the sampled tokens, whatever `column` is. 0 for fewer than n of
    them, NULL where the text or the tokens are NULL.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"],
    ...                      "response_text": ["wait wait wait wait wait", "so it is four"]})
    >>> rows.pipe(repetition_score(n=2))["repetition_score"].to_list()
    [0.75, 0.0]
    """
    reads = (column,) if of == "words" else ("token_ids", "loss_mask")

    def measure(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = pl.DataFrame(pl.from_arrow(batch.select(list(reads))))
        pieces = rows.select(_words(column) if of == "words" else _sampled_tokens()).to_series()
        shares = repeated_shares(pieces, n=n)
        return pa.record_batch({"repetition_score": shares.to_arrow()})

    return Declared(body=Batches(measure, columns={"repetition_score": pl.Float64}), reads=reads)


def _words(column: str) -> pl.Expr:
    return pl.col(column).str.to_lowercase().str.extract_all(r"\w+|[^\w\s]")


def _sampled_tokens() -> pl.Expr:
    places = pl.col("loss_mask").list.eval(pl.element().arg_true())
    return pl.col("token_ids").list.gather(places)


def repeated_shares(pieces: pl.Series, *, n: int) -> pl.Series:
    """Return, of each list of pieces, the share of its n-grams that came before in it."""
    lengths = pieces.list.len().fill_null(0).to_numpy().astype(np.int64)
    flat = pieces.filter(pieces.list.len() > 0).explode()
    codes = flat.rank("dense").to_numpy().astype(np.int64)
    rows = np.repeat(np.arange(len(pieces)), lengths)
    grams = codes
    for i in range(1, n):
        # numbered anew each time, so that no product overflows
        pairs = grams[: len(codes) - i] * (codes.max(initial=0) + 1) + codes[i:]
        grams = np.unique(pairs, return_inverse=True)[1]
    starts = rows[: len(grams)]
    inside = starts == rows[n - 1 :]
    size = grams.max(initial=0) + 1
    different = np.unique(starts[inside] * size + grams[inside])
    distinct = np.bincount(different // size, minlength=len(pieces))
    total = np.maximum(lengths - n + 1, 0)
    share = 1.0 - distinct / np.maximum(total, 1)
    return pl.Series(np.where(total > 0, share, 0.0)).set(pieces.is_null(), None)
