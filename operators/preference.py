"""Preference pairs: a better and a worse answer to the same task."""

from functools import partial
from typing import Literal

import polars as pl

from ..store.ids import preference_id
from .body import Declared, Explained
from .comparable_rows import ASIDE, ID, REWARD, DistinctBy, columns, with_aside
from .decorator import operator
from .diverging_pairs import with_parted, with_reason
from .parameters import Count
from .scope import UNIT, Unit, seen
from .statistics import seeded_uniform

_PAIR = pl.Schema(
    {
        "preference_id": pl.String,
        "task_id": pl.String,
        "chosen_id": pl.String,
        "rejected_id": pl.String,
        "margin": pl.Float64,
    }
)
_PAIRED = "others of its {} were paired"
_MARGIN = pl.col("reward") - pl.col("reward_worse")

Strategy = Literal["max_min", "best_against_rest", "all", "random"]
"""How better and worse replies are combined into pairs."""


@operator("reshape", writes=tuple(_PAIR), links=("chosen_id", "rejected_id"))
def pairs(
    *,
    strategy: Strategy = "max_min",
    min_margin: float = 0.0,
    within: Unit = "group",
    max_pairs: Count | None = None,
    distinct_by: DistinctBy | None = "messages",
    last_step: bool = False,
    seed: int = 0,
) -> Declared:
    """Turn groups into rows of `preferences`: a better reply against a worse one.

    `max_min` pairs the best with the worst (the default of online DPO, arXiv:2405.07863),
    `best_against_rest` the best with every worse one, `all` every better with every worse one, the
    widest margins first; `random` draws pairs by `seed`. Rewards of a pair differ by at least
    `min_margin`, and are never equal: `all` with a `min_margin` gives all pairs by margin. Each
    group (or task, if `within` is `task`) gives at most `max_pairs`; the default is 1 for `random`
    and 100 for the others.

    Equal replies of a group count once, with the largest reward, so that no pair holds the same
    reply twice. Replies are equal when the whole conversations are (`messages`), or only the last
    replies (`response_text`); None disables the comparison. With `messages`, two conversations that
    diverge at a question, not at an answer, are not paired. With `last_step`, only the last row of
    a rollout of several rows counts. Among equal rewards, the first id is taken. Every row without
    a pair is dropped, with the reason.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "task_id": "t", "group_id": "g",
    ...                      "reward": [0.0, 1.0], "response_text": ["5", "4"]})
    >>> best = rows.pipe(pairs(distinct_by="response_text"))
    >>> best.select("chosen_id", "rejected_id", "margin").rows()
    [('b', 'a', 1.0)]
    """
    most = max_pairs if max_pairs is not None else 1 if strategy == "random" else 100
    unit = UNIT[within]

    def counted(frame: pl.LazyFrame) -> pl.LazyFrame:
        return with_aside(frame, unit=unit, distinct_by=distinct_by, last_step=last_step)

    def make(frame: pl.LazyFrame) -> pl.LazyFrame:
        # a unit is named by where it begins: NULL is one too, and no join finds that
        begins = pl.col("_place").min().over(unit)
        placed = counted(frame).with_columns(_place=pl.int_range(pl.len()))
        placed = placed.with_columns(_unit=begins)
        scored = placed.filter(pl.col(ASIDE).is_null())
        scored = scored.select("experience_id", "task_id", "_unit", reward=REWARD)
        both = _combined(_ranked(scored), strategy, most, seed)
        both = both.filter((_MARGIN > 0) & (min_margin <= _MARGIN))
        both = with_parted(both, placed, unit="_unit") if distinct_by == "messages" else both
        return _as_pairs(_first(both, most), placed.select("experience_id", "_place"))

    def explain(frame: pl.LazyFrame) -> pl.LazyFrame:
        rows = counted(frame).with_columns(_why_not(unit, min_margin).alias("reason"))
        if distinct_by != "messages":
            return rows
        otherwise = _PAIRED.format(unit.removesuffix("_id"))
        return rows.map_batches(partial(with_reason, unit=unit, otherwise=otherwise))

    reads = columns(distinct_by, last_step=last_step)
    return Declared(body=Explained(make, reason=explain), reads=reads, scope=seen(within))


def _ranked(scored: pl.LazyFrame) -> pl.LazyFrame:
    """Add each row's rank in its unit, from the best (`top`) and from the worst (`low`)."""
    place = pl.int_range(pl.len()).over("_unit")
    up = scored.sort("reward", "experience_id").with_columns(low=place)
    return up.sort("reward", "experience_id", descending=[True, False]).with_columns(top=place)


def _combined(rows: pl.LazyFrame, strategy: Strategy, most: int, seed: int) -> pl.LazyFrame:
    """Return better rows joined with worse ones, and `order`, by which pairs are sorted."""
    best, worst = rows.filter(pl.col("top") == 0), rows.filter(pl.col("low") == 0)
    if strategy == "random":
        return _drawn(rows, best, worst, seed)
    # a pair among the `most` widest margins has a row of the `most` best and one of the worst
    better = rows.filter(pl.col("top") < most) if strategy == "all" else best
    worse = worst if strategy == "max_min" else rows.filter(pl.col("low") < most)
    both = better.join(worse, on="_unit", suffix="_worse")
    # of equal margins, not one row over and over
    return both.with_columns(order=(pl.col("top") + pl.col("low_worse")).cast(pl.Float64))


def _drawn(rows: pl.LazyFrame, best: pl.LazyFrame, worst: pl.LazyFrame, seed: int) -> pl.LazyFrame:
    """Put a unit's rows in a circle in random order and pair neighbors; the widest pair is last.

    All pairs are equally likely, and no row is in more than two.
    """
    drawn = ID.map_elements(lambda name: seeded_uniform(seed, name), return_dtype=pl.Float64)
    circle = rows.with_columns(order=drawn).sort("order", "experience_id")
    following = [
        pl.coalesce(pl.col(n).shift(-1), pl.col(n).first()).over("_unit").alias(f"{n}_worse")
        for n in ("experience_id", "reward")
    ]
    circle = circle.with_columns(following)
    turned = [pl.col("experience_id", "reward"), pl.col("experience_id_worse", "reward_worse")]
    there = circle.select("_unit", "task_id", "order", *turned)
    back = circle.select(
        "_unit",
        "task_id",
        "order",
        experience_id="experience_id_worse",
        reward="reward_worse",
        experience_id_worse="experience_id",
        reward_worse="reward",
    )
    widest = best.join(worst, on="_unit", suffix="_worse").with_columns(order=pl.lit(2.0))
    every = pl.concat([there, back, widest.select(there.collect_schema().names())])
    return every.unique(
        ["_unit", "experience_id", "experience_id_worse"], keep="first", maintain_order=True
    )


def _first(both: pl.LazyFrame, most: int) -> pl.LazyFrame:
    """Keep the first pairs of each unit: the widest margins, or the first in random order."""
    by_chance = "top" not in both.collect_schema().names()
    wide = [] if by_chance else [-_MARGIN]
    both = both.sort("_unit", *wide, "order", "experience_id", "experience_id_worse")
    return both.filter(pl.int_range(pl.len()).over("_unit") < most)


def _as_pairs(both: pl.LazyFrame, placed: pl.LazyFrame) -> pl.LazyFrame:
    """Return rows of `preferences`, in the order of their better replies."""
    pair = (
        both.join(placed, on="experience_id")
        .sort("_place", "experience_id_worse")
        .select(
            "task_id", chosen_id="experience_id", rejected_id="experience_id_worse", margin=_MARGIN
        )
    )
    name = pl.struct("chosen_id", "rejected_id").map_elements(
        lambda two: preference_id(two["chosen_id"], two["rejected_id"]), return_dtype=pl.String
    )
    return pair.select(name.alias("preference_id"), *list(_PAIR)[1:])


def _why_not(unit: str, min_margin: float) -> pl.Expr:
    """Return the reason why a row is in no pair."""
    who = unit.removesuffix("_id")
    rewards = REWARD.filter(pl.col(ASIDE).is_null())
    top, low = rewards.max().over(unit), rewards.min().over(unit)
    none = f"its {who} gives no pair: "
    equal = pl.format(f"{none}all rewards are {{}}", top.round_sig_figs(6))
    return (
        pl.when(pl.col(ASIDE).is_not_null())
        .then(ASIDE)
        .when(rewards.count().over(unit) < 2)
        .then(pl.lit(f"{none}it has no second reply with a reward"))
        .when(top == low)
        .then(equal)
        .when(top - low < min_margin)
        .then(pl.lit(f"{none}rewards differ by less than {min_margin:g}"))
        .otherwise(pl.lit(_PAIRED.format(who)))
    )
