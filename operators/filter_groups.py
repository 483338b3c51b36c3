"""Filters of groups, and of rows by their place in a group."""

import polars as pl

from ..store.errors import OperatorError
from .body import Declared, Explained, FrameFunction
from .decorator import operator
from .invariants import id_column
from .scope import UNIT, Within, seen
from .statistics import GROUP, finite, reward, std


@operator("filter", version=2, whole_groups=True)
def drop_flat_groups(*, min_std: float = 0.0) -> Explained:
    """Drop groups whose rewards do not differ: no answer in them is better than another.

    A group stays, NULL rewards and all, when the sample standard deviation of its rewards exceeds
    `min_std`; that of equal rewards is exactly 0. NaN and infinity do not count.

    >>> rows = pl.DataFrame({"experience_id": list("abcd"), "group_id": list("gghh"),
    ...                      "reward": [1.0, 0.0, 1.0, 1.0]})
    >>> drop_flat_groups().split(rows)[1].select("experience_id", "reason").row(0)
    ('c', 'rewards of its group do not differ (std is not above 0)')
    """
    spread = std(reward, GROUP) > min_std
    few = reward.count().over(GROUP) < 2
    flat = f"rewards of its group do not differ (std is not above {min_std:g})"
    reason = (
        pl.when(few).then(pl.lit("its group has fewer than two rewards")).otherwise(pl.lit(flat))
    )
    return Explained(spread, reason=reason)


@operator("filter", whole_groups=True)
def dapo_dynamic_sampling(
    *, accuracy: str = "accuracy", column: str | None = None, threshold: float = 0.5
) -> Declared:
    """Drop groups whose answers are all right or all wrong (DAPO, arXiv:2503.14476, eq. 11).

    An answer is right when its accuracy is above `threshold`. The accuracy is the entry `accuracy`
    of `rewards` or else of `metrics`, or a `column`; a group in which no row has such an entry is
    judged by `reward`, which misleads where the reward is shaped. Rows without an accuracy do not
    count, and a group with fewer than two that have one is dropped.

    >>> rows = pl.DataFrame({"experience_id": list("abcd"), "group_id": list("gghh"),
    ...                      "accuracy": [1.0, 1.0, 1.0, 0.0]})
    >>> dapo_dynamic_sampling(column="accuracy").split(rows)[1]["reason"].to_list()
    ['2 of 2 answers of its group are right', '2 of 2 answers of its group are right']
    """
    value = _accuracy(accuracy).fill_nan(None) if column is None else finite(column)
    right = (value > threshold).sum().over(GROUP)
    counted = value.count().over(GROUP)
    few = pl.format("{} of its group have an accuracy, expected two at least", counted)
    same = pl.format("{} of {} answers of its group are right", right, counted)
    reason = pl.when(counted < 2).then(few).otherwise(same)
    return Declared(
        body=Explained((right > 0) & (right < counted), reason=reason),
        reads=(GROUP, column) if column else (GROUP, "reward", "rewards", "metrics"),
    )


@operator("filter")
def keep_best(
    *,
    best: int = 1,
    by: str = "reward",
    within: Within = "group",
    ascending: bool = False,
) -> Declared:
    """Keep the best rows of each group (or task, or of all rows) by a column.

    Best are the largest, or with `ascending` the smallest; of equal ones the first id. A row where
    the column is NULL or NaN is never among them.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": list("ggh"),
    ...                      "reward": [0.0, 1.0, 0.5]})
    >>> keep_best().split(rows)[1].select("experience_id", "reason").rows()
    [('a', 'number 2 of 2 by reward in its group, the first 1 stay')]
    """
    if best < 1:
        raise OperatorError(f"`best` of `keep_best` must be 1 or more, got {best}")
    unit = UNIT.get(within)

    def choose(frame: pl.LazyFrame) -> pl.LazyFrame:
        schema = frame.collect_schema()
        key = id_column(schema.names())
        value = pl.col(by).fill_nan(None) if schema[by].is_float() else pl.col(by)
        known = frame.select(key, *([unit] if unit else []), value.alias("_by")).drop_nulls("_by")
        number, count = pl.int_range(1, pl.len() + 1), pl.len()
        places = known.sort("_by", key, descending=[not ascending, False]).select(
            key,
            (number.over(unit) if unit else number).alias("_number"),
            (count.over(unit) if unit else count).alias("_count"),
        )
        message = "among all rows" if within == "all" else f"in its {within}"
        place = pl.format(
            f"number {{}} of {{}} by {by} {message}, the first {best} stay", "_number", "_count"
        )
        none = pl.col("_number").is_null()
        marked = frame.join(places, on=key, how="left", maintain_order="left").with_columns(
            (pl.col("_number") <= best).fill_null(value=False).alias("keep"),
            pl.when(none).then(pl.lit(f"{by} is not there")).otherwise(place).alias("reason"),
        )
        return marked.drop("_number", "_count")

    body: FrameFunction = choose
    reads = (by, unit) if unit else (by,)
    return Declared(body=body, reads=reads, scope=seen(within))


def _accuracy(name: str) -> pl.Expr:
    message = pl.coalesce(_entry("rewards", name), _entry("metrics", name))
    # of a group as a whole: where some have it, it was not computed for the others
    some = message.count().over(GROUP) > 0
    return pl.when(some).then(message).otherwise(pl.col("reward").cast(pl.Float64))


def _entry(column: str, name: str) -> pl.Expr:
    """Return the value of an entry in a list of names with values; NULL where it is not there."""
    named = pl.element().filter(pl.element().struct.field("name") == name)
    return pl.col(column).list.eval(named.struct.field("value")).list.first().cast(pl.Float64)
