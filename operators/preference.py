"""Preference pairs: a better and a worse answer to the same task."""

from typing import Literal

import polars as pl

from ..store.ids import content_id
from .body import Explained
from .decorator import operator

_PAIR = pl.Schema(
    {
        "preference_id": pl.String,
        "task_id": pl.String,
        "chosen_id": pl.String,
        "rejected_id": pl.String,
        "margin": pl.Float64,
    }
)


@operator(
    "reshape",
    reads=("experience_id", "task_id", "group_id", "reward"),
    writes=tuple(_PAIR),
    links=("chosen_id", "rejected_id"),
)
def pairs(
    *, strategy: Literal["max_min", "best_against_rest"] = "max_min", min_margin: float = 0.0
) -> Explained:
    """Turn groups into rows of `preferences`: the best answer against a worse one.

    `max_min` pairs the best with the worst, `best_against_rest` with every worse one. A pair's
    rewards differ by more than `min_margin`. Of equal rewards the first id is taken. Every row
    that is in no pair is dropped, with the reason.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "task_id": "t", "group_id": "g",
    ...                      "reward": [0.0, 1.0]})
    >>> rows.pipe(pairs()).select("chosen_id", "rejected_id", "margin").rows()
    [('b', 'a', 1.0)]
    """

    def make(frame: pl.LazyFrame) -> pl.LazyFrame:
        scored = frame.filter(pl.col("reward").is_not_null())
        scored = scored.select("experience_id", "task_id", "group_id", "reward")
        best = scored.sort("reward", "experience_id", descending=[True, False])
        best = best.unique("group_id", keep="first", maintain_order=True)
        worse = scored.sort("reward", "experience_id")
        if strategy == "max_min":
            worse = worse.unique("group_id", keep="first", maintain_order=True)
        both = best.join(worse, on="group_id", suffix="_worse").sort(
            "group_id", "experience_id_worse"
        )
        margin = pl.col("reward") - pl.col("reward_worse")
        both = both.filter((margin > 0) & (margin > min_margin))
        pair = both.select(
            "task_id",
            pl.col("experience_id").alias("chosen_id"),
            pl.col("experience_id_worse").alias("rejected_id"),
            margin.alias("margin"),
        )
        name = pl.struct("chosen_id", "rejected_id").map_elements(_pair_id, return_dtype=pl.String)
        return pair.select(name.alias("preference_id"), *list(_PAIR)[1:])

    return Explained(make, reason=_why_not(min_margin))


def _pair_id(pair: dict[str, str]) -> str:
    return content_id(pair["chosen_id"], pair["rejected_id"])


def _why_not(min_margin: float) -> pl.Expr:
    reward = pl.col("reward")
    top, low = reward.max().over("group_id"), reward.min().over("group_id")
    few = reward.count().over("group_id") < 2
    some = top - low > min_margin
    return (
        pl.when(reward.is_null())
        .then(pl.lit("its reward is NULL"))
        .when(few)
        .then(pl.lit("its group gives no pair: fewer than two rewards"))
        .when(~some | (top == low))
        .then(pl.lit(f"its group gives no pair: rewards do not differ by more than {min_margin:g}"))
        .otherwise(pl.lit("others of its group were paired"))
    )
