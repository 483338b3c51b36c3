"""Which rows of a group (or task) may be compared: those with a value, each reply once."""

from typing import Literal

import polars as pl

from .invariants import id_column

DistinctBy = Literal["messages", "response_text"]
"""The column by which replies are compared."""

ASIDE = "set_aside"
"""Column with the reason why a row does not count; NULL where it counts."""

_TEXT = "text_of_the_reply"
REWARD = pl.col("reward").cast(pl.Float64)
ID = pl.col("experience_id")


def columns(distinct_by: DistinctBy | None, *, last_step: bool) -> tuple[str, ...]:
    """Return the columns that `with_aside` reads."""
    texts = {"messages": ("messages", "response_text"), "response_text": ("response_text",)}
    text = texts[distinct_by] if distinct_by else ()
    index = ("rollout_index",) if last_step else ()
    return ("experience_id", "task_id", "group_id", "reward", *index, *text)


def with_aside(
    frame: pl.LazyFrame,
    *,
    unit: str | None,
    distinct_by: DistinctBy | None,
    last_step: bool,
    by: str = "reward",
    ascending: bool = False,
) -> pl.LazyFrame:
    """Add the column ASIDE; of equal replies of a unit, the one with the best value of `by` counts.

    `unit` is the column that says which rows are compared; None compares all rows. With `messages`,
    replies are equal when the whole conversations are: two rollouts of several turns that end in
    the same words are not. A row without messages is compared by its `response_text`, and a row
    without any text equals no other.
    """
    schema = frame.collect_schema()
    key, value = id_column(schema.names()), pl.col(by)
    never = pl.lit(False)  # noqa: FBT003
    why = (
        pl.when(~_is_last() if last_step else never)
        .then(pl.lit("an earlier step of its rollout"))
        .when(value.is_null())
        .then(pl.lit(f"its {by} is NULL"))
        .when(~value.is_finite() if schema[by].is_float() else never)
        .then(pl.lit(f"its {by} is not finite"))
    )
    frame = frame.with_columns(why.alias(ASIDE))
    if distinct_by is None:
        return frame
    text = list(columns(distinct_by, last_step=False)[4:])
    # sorting once is faster than a window function over very many small groups
    is_aside = pl.col(ASIDE).is_not_null()
    order = pl.arg_sort_by(is_aside, value, key, descending=[False, not ascending, False])
    reply = pl.struct(unit, _TEXT) if unit else pl.struct(_TEXT)
    is_first = reply.gather(order).is_first_distinct().gather(order.arg_sort())
    where = f" of its {unit.removesuffix('_id')}" if unit else ""
    again = pl.when(~is_first).then(pl.lit(f"an equal reply{where} counts"))
    return (
        frame.with_columns(pl.coalesce(*text, key).alias(_TEXT))
        .with_columns(pl.coalesce(ASIDE, again).alias(ASIDE))
        .drop(_TEXT)
    )


def _is_last() -> pl.Expr:
    # the explorer numbers the rows of a rollout "02", "02.1" ... "02.10": shorter ids come first
    last = ID.sort_by(ID.str.len_bytes(), ID).last().over("group_id", "rollout_index")
    return last == ID
