"""Filters of whole groups, and of rows by their rank in a group."""

import polars as pl

from .body import Declared, Explained
from .comparable_rows import ASIDE, DistinctBy, columns, with_aside
from .decorator import operator
from .invariants import id_column
from .parameters import Count
from .scope import UNIT, Within, seen
from .statistics import GROUP, finite, reward, std


@operator("filter", version=2, whole_groups=True)
def drop_flat_groups(*, min_std: float = 0.0) -> Explained:
    """Drop groups whose rewards do not differ, since they give no learning signal.

    A group is kept, including its rows with NULL rewards, when the sample standard deviation of its
    rewards exceeds `min_std`; that of equal rewards is exactly 0. NaN and infinity do not count.

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
    of `rewards` or else of `metrics`, or a `column`; if no row of a group has such an entry,
    `reward` is used, which is misleading if the reward is shaped. Rows without an accuracy do not
    count, and a group with fewer than two rows that have one is dropped.

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
def top_k(
    *,
    k: Count = 1,
    by: str = "reward",
    within: Within = "group",
    ascending: bool = False,
    min_value: float | None = None,
    distinct_by: DistinctBy | None = None,
    last_step: bool = False,
) -> Declared:
    """Keep the `k` best rows of each group (or task, or of all rows) by a column.

    The best rows have the largest values, or with `ascending` the smallest; among equal values, the
    first ids. Rows whose value is NULL, not finite or below `min_value` are never kept. With
    `distinct_by`, equal replies count once; it and `last_step` are as in `pairs`.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": list("ggh"),
    ...                      "reward": [0.0, 1.0, 0.5]})
    >>> top_k().split(rows)[1].select("experience_id", "reason").rows()
    [('a', 'rank 2 of 2 by reward in its group; the first 1 are kept')]
    """
    unit = UNIT.get(within)

    def choose(frame: pl.LazyFrame) -> pl.LazyFrame:
        names = frame.collect_schema().names()
        key = id_column(names)
        rows = with_aside(
            frame,
            unit=unit,
            distinct_by=distinct_by,
            last_step=last_step,
            by=by,
            ascending=ascending,
        )
        if min_value is not None:
            low = pl.when(pl.col(by) < min_value).then(pl.lit(f"its {by} is below {min_value:g}"))
            rows = rows.with_columns(pl.coalesce(ASIDE, low).alias(ASIDE))
        counted = rows.filter(pl.col(ASIDE).is_null())
        rank, count = pl.int_range(1, pl.len() + 1), pl.len()
        ranks = counted.sort(by, key, descending=[not ascending, False]).select(
            key,
            (rank.over(unit) if unit else rank).alias("_rank"),
            (count.over(unit) if unit else count).alias("_count"),
        )
        among = "among all rows" if within == "all" else f"in its {within}"
        late = pl.format(
            f"rank {{}} of {{}} by {by} {among}; the first {k} are kept", "_rank", "_count"
        )
        marked = rows.join(ranks, on=key, how="left", maintain_order="left").with_columns(
            keep=(pl.col("_rank") <= k).fill_null(value=False), reason=pl.coalesce(ASIDE, late)
        )
        return marked.select(*names, "keep", "reason")

    reads = {by, *([unit] if unit else []), *columns(distinct_by, last_step=last_step)[4:]}
    if last_step:
        reads |= {"experience_id", "group_id"}
    return Declared(body=choose, reads=tuple(sorted(reads)), scope=seen(within))


def _accuracy(name: str) -> pl.Expr:
    entry = pl.coalesce(_entry("rewards", name), _entry("metrics", name))
    # decided per group: if some rows have the entry, it is NULL, not the reward, for the others
    some = entry.count().over(GROUP) > 0
    return pl.when(some).then(entry).otherwise(pl.col("reward").cast(pl.Float64))


def _entry(column: str, name: str) -> pl.Expr:
    """Return the value of an entry in a list of named values; NULL where it does not exist."""
    named = pl.element().filter(pl.element().struct.field("name") == name)
    return pl.col(column).list.eval(named.struct.field("value")).list.first().cast(pl.Float64)
