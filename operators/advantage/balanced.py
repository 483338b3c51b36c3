"""Advantages of groups from which answers below the mean are left out."""

from typing import Literal

import polars as pl

from ..body import FrameFunction
from ..decorator import operator
from ..statistics import GROUP, advantage, centered, reward, seeded_uniform, zscore

_LOW, _KEPT, _PLACE = "is_below_the_mean", "reward_kept", "place_by_lot"


@operator(
    "derive",
    reads=("experience_id", "group_id", "reward"),
    writes=("advantage",),
    whole_groups=True,
)
def balanced(
    *,
    drop: Literal["none", "balance"] = "balance",
    normalize: Literal["none", "std"] = "none",
    epsilon: float = 1e-6,
    seed: int = 0,
) -> FrameFunction:
    """Set `advantage` to the reward less the mean of the answers of its group that are kept.

    With `drop="balance"` (RED-drop of arXiv:2509.24203) a group with more rewards below its mean
    than others keeps as many of those as it has others; which, a lot by `seed` and id decides. An
    answer that is not kept has advantage 0: it pulls nowhere. With `drop="none"` all are kept, the
    group-relative REINFORCE of that paper. `normalize="std"` divides by the deviation of the kept,
    plus `epsilon`.

    >>> rows = pl.DataFrame({"experience_id": list("abcd"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.0, 0.0]})
    >>> sorted(rows.pipe(balanced())["advantage"])
    [-0.5, 0.0, 0.0, 0.5]
    """

    def set_advantage(frame: pl.LazyFrame) -> pl.LazyFrame:
        drawn = frame.with_columns((centered(reward, GROUP) < 0).alias(_LOW), _lot(seed))
        is_kept = reward.is_not_null() if drop == "none" else _is_kept()
        kept = drawn.with_columns(pl.when(is_kept).then(reward).alias(_KEPT))
        one = pl.col(_KEPT)
        scaled = normalize == "std"
        value = zscore(one, GROUP, epsilon=epsilon) if scaled else centered(one, GROUP)
        # 0, not NULL, which would say that the advantage was not computed
        return kept.with_columns(advantage(value.fill_null(0.0))).drop(_LOW, _KEPT, _PLACE)

    return set_advantage


def _lot(seed: int) -> pl.Expr:
    def draw(ids: pl.Series) -> pl.Series:
        return pl.Series([seeded_uniform(seed, one) for one in ids], dtype=pl.Float64)

    ids = pl.col("experience_id")
    return ids.map_batches(draw, return_dtype=pl.Float64, is_elementwise=True).alias(_PLACE)


def _is_kept() -> pl.Expr:
    is_other = pl.col(_LOW).not_()
    place = pl.col(_PLACE).rank("ordinal").over(GROUP, _LOW)
    return is_other | (place <= is_other.sum().over(GROUP))
