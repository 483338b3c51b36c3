"""Filters of single rows, each with the reason why a row is dropped."""

import math
from typing import Literal

import polars as pl

from ..store.errors import OperatorError
from .body import Explained, FrameFunction, Value
from .decorator import operator
from .invariants import id_column
from .parameters import Share
from .statistics import seeded_uniform

Length = Literal["characters", "tokens", "sampled_tokens"]
"""Characters of a text column, all tokens of the row, or those that the policy sampled."""


@operator("filter")
def keep(*, where: str) -> Explained:
    """Keep rows for which an SQL condition (DuckDB's dialect, as in `Store.sql`) is true.

    A row for which it is NULL is dropped, as in SQL.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "response_text": ["4", "four, I think"]})
    >>> rows.pipe(keep(where="length(response_text) < 5")).rows()
    [('a', '4')]
    """
    return Explained(Value(where), reason=f"not true: {where}")


@operator("filter")
def keep_reward_between(*, low: float | None = None, high: float | None = None) -> Explained:
    """Keep rows whose reward is from `low` to `high`, both included.

    A row whose reward is NULL or NaN is dropped.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b", "c"], "reward": [0.2, 1.0, None]})
    >>> keep_reward_between(low=0.5).split(rows)[1]["reason"].to_list()
    ['reward 0.2 is below 0.5', 'reward is NULL']
    """
    return _between(pl.col("reward").cast(pl.Float64), "reward", low, high)


@operator("filter")
def keep_length_between(
    *,
    low: int | None = None,
    high: int | None = None,
    of: Length = "characters",
    column: str = "response_text",
) -> Explained:
    """Keep rows whose length is from `low` to `high`, both included.

    The length is that of the text in `column` in characters, of the whole row in tokens
    (`num_tokens`), or the count of its tokens that the policy sampled (`loss_mask`). A row without
    it is dropped.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "response_text": ["4", "four, I think"]})
    >>> keep_length_between(high=5).split(rows)[1]["reason"].to_list()
    ['length 13 in characters is above 5']
    """
    lengths = {
        "characters": pl.col(column).str.len_chars(),
        "tokens": pl.col("num_tokens"),
        "sampled_tokens": pl.col("loss_mask").list.sum(),
    }
    return _between(lengths[of], "length", low, high, unit=f" in {of.replace('_', ' ')}")


@operator("filter")
def drop_unscored(*, column: str = "reward") -> Explained:
    """Drop rows whose reward was not computed, or is NaN or infinite.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "reward": [0.0, None]})
    >>> drop_unscored().split(rows)[1].select("experience_id", "reason").rows()
    [('b', 'reward is NULL')]
    """
    value = pl.col(column).cast(pl.Float64)
    return Explained(value.is_finite(), reason=_no_number(value, column))


@operator("filter")
def drop_truncated(*, finish_reasons: list[str] | None = None) -> Explained:
    """Drop truncated rows: `finish_reason` is `length`, or one of `finish_reasons`.

    A row without a `finish_reason` stays.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "finish_reason": ["stop", "length"]})
    >>> drop_truncated().split(rows)[1].select("experience_id", "reason").rows()
    [('b', 'it was cut off: finish_reason is length')]
    """
    names = ["length"] if finish_reasons is None else finish_reasons
    finished = pl.col("finish_reason")
    return Explained(
        ~finished.is_in(names).fill_null(value=False),
        reason=pl.format("it was cut off: finish_reason is {}", finished),
    )


@operator("filter", scope="row", reads=())
def sample(*, share: Share, seed: int = 0) -> FrameFunction:
    """Keep a share of the rows, selected by a hash of their ids: the same rows each time.

    Whether a row is kept does not depend on other rows, or on when it was added. With the same
    seed, a smaller share is a subset of a larger one.

    >>> rows = pl.DataFrame({"experience_id": list("abcdef")})
    >>> rows.pipe(sample(share=0.5))["experience_id"].to_list()
    ['b', 'f']
    """

    def draw(frame: pl.LazyFrame) -> pl.LazyFrame:
        ids = pl.col(id_column(frame.collect_schema().names()))
        drawn = ids.map_elements(
            lambda i: seeded_uniform(seed, "sample", i), return_dtype=pl.Float64
        )
        message = pl.format(f"drew {{}}, below {share:g} it would stay", drawn.round(4))
        return frame.with_columns((drawn < share).alias("keep"), message.alias("reason"))

    return draw


def _between(
    value: pl.Expr, what: str, low: float | None, high: float | None, *, unit: str = ""
) -> Explained:
    if low is None and high is None:
        raise OperatorError("a range needs `low`, `high` or both")
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if low > high:
        raise OperatorError(f"`low` is {low:g}, above `high`, which is {high:g}: no row would stay")
    is_number = value.is_finite().fill_null(value=False)
    reason = (
        pl.when(~is_number)
        .then(_no_number(value, what))
        .when(value < low)
        .then(pl.format(f"{what} {{}}{unit} is below {low:g}", value))
        .otherwise(pl.format(f"{what} {{}}{unit} is above {high:g}", value))
    )
    return Explained(is_number & value.is_between(low, high), reason=reason)


def _no_number(value: pl.Expr, what: str) -> pl.Expr:
    return pl.format(f"{what} is {{}}", value.cast(pl.String).fill_null("NULL"))
