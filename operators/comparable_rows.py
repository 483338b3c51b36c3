"""Which replies of a group (or task) may be compared: those with a reward, each reply once."""

from typing import Literal

import polars as pl

DistinctBy = Literal["messages", "response_text"]
"""The column by which replies are found equal."""

ASIDE = "set_aside"
"""Column that says why a row does not count among the others; NULL where it does."""

_TEXT = "text_of_the_reply"
REWARD = pl.col("reward").cast(pl.Float64)
ID = pl.col("experience_id")


def columns(distinct_by: DistinctBy | None, *, last_step: bool) -> tuple[str, ...]:
    """Return the columns that `with_aside` reads."""
    texts = {"messages": ("messages", "response_text"), "response_text": ("response_text",)}
    message = texts[distinct_by] if distinct_by else ()
    tries = ("rollout",) if last_step else ()
    return ("experience_id", "task_id", "group_id", "reward", *tries, *message)


def with_aside(
    frame: pl.LazyFrame, *, unit: str, distinct_by: DistinctBy | None, last_step: bool
) -> pl.LazyFrame:
    """Add the column ASIDE; of equal replies of a unit the one with the largest reward counts.

    With `messages`, replies are equal when the whole conversations are: two tries of several turns
    that end in the same words are not. A row without messages is compared by its `response_text`,
    and one without any text is equal to none.
    """
    why = (
        pl.when(~_is_last() if last_step else pl.lit(False))  # noqa: FBT003
        .then(pl.lit("an earlier step of its try"))
        .when(REWARD.is_null())
        .then(pl.lit("its reward is NULL"))
        .when(~REWARD.is_finite())
        .then(pl.lit("its reward is not finite"))
    )
    frame = frame.with_columns(why.alias(ASIDE))
    if distinct_by is None:
        return frame
    message = list(columns(distinct_by, last_step=False)[4:])
    # to sort once is faster than a window of very many small parts
    order = pl.arg_sort_by(pl.col(ASIDE).is_not_null(), -REWARD, ID)
    is_first = pl.struct(unit, _TEXT).gather(order).is_first_distinct().gather(order.arg_sort())
    again = pl.when(~is_first).then(pl.lit(f"an equal reply of its {unit[:-3]} counts"))
    return (
        frame.with_columns(pl.coalesce(*message, ID).alias(_TEXT))
        .with_columns(pl.coalesce(ASIDE, again).alias(ASIDE))
        .drop(_TEXT)
    )


def _is_last() -> pl.Expr:
    # the explorer names the rows of a try "02", "02.1" ... "02.10"
    last = ID.sort_by(ID.str.len_bytes(), ID).last().over("group_id", "rollout")
    return last == ID
