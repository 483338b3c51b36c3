"""Filters: keep fewer rows, and say why of each that goes."""

import polars as pl

from .body import Explained, Value
from .decorator import operator


@operator("filter")
def keep(*, where: str) -> Explained:
    """Keep rows for which an SQL condition (DuckDB's dialect, as in `Store.sql`) is true.

    A row for which it is NULL is dropped, as in SQL.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "response_text": ["4", "four, I think"]})
    >>> rows.pipe(keep(where="length(response_text) < 5")).rows()
    [('a', '4')]
    """
    return Explained(Value(where), reason=f"not true: {where}")


@operator("filter", whole_groups=True)
def drop_flat_groups(*, min_std: float = 0.0) -> Explained:
    """Drop groups whose rewards do not differ: no answer in them is better than another.

    A group stays, NULL rewards and all, when the sample standard deviation of its rewards exceeds
    `min_std`.

    >>> rows = pl.DataFrame({"experience_id": list("abcd"), "group_id": list("gghh"),
    ...                      "reward": [1.0, 0.0, 1.0, 1.0]})
    >>> drop_flat_groups().split(rows)[1].select("experience_id", "reason").row(0)
    ('c', 'rewards of its group do not differ (std is not above 0)')
    """
    reward = pl.col("reward")
    spread = reward.std(ddof=1).over("group_id") > min_std
    few = reward.count().over("group_id") < 2
    flat = f"rewards of its group do not differ (std is not above {min_std:g})"
    reason = (
        pl.when(few).then(pl.lit("its group has fewer than two rewards")).otherwise(pl.lit(flat))
    )
    return Explained(spread, reason=reason)
