"""Advantages of answers that pass or fail, from the pass rate of their group."""

from functools import reduce
from operator import mul

import polars as pl

from ..body import FrameFunction
from ..decorator import operator
from ..parameters import Count
from ..statistics import GROUP, advantage, inverse, reward


@operator("derive", whole_groups=True)
def max_rl(*, threshold: float = 0.5) -> pl.Expr:
    """Set `advantage` to (passed - pass rate) / pass rate of the group (MaxRL, arXiv:2602.02710).

    An answer passes when its reward is above `threshold`. The rarer a pass is, the more it counts,
    as in maximum likelihood; groups without a pass say nothing.

    >>> rows = pl.DataFrame({"experience_id": list("abcd"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.0, 0.0]})
    >>> rows.pipe(max_rl())["advantage"].to_list()
    [3.0, -1.0, -1.0, -1.0]
    """
    rate = _num_passed(threshold) / _num_rewards()
    gain = ((reward > threshold).cast(pl.Float64) - rate) * inverse(rate)
    return advantage(pl.when(rate > 0).then(gain).otherwise(0.0))


@operator("derive", whole_groups=True, reads=("group_id", "reward"), writes=("advantage",))
def pass_at_k(*, k: Count, threshold: float = 0.5) -> FrameFunction:
    """Set `advantage` to what an answer does for the best of k (pass@k training, arXiv:2508.10751).

    Each k answers of a group of n share one reward, 1 when any of them passes; an answer's
    advantage is the mean of those of all such sets that it is in, in standard deviations of all
    sets. An answer passes when its reward is above `threshold`. Groups with fewer than k rewards
    say nothing.

    >>> rows = pl.DataFrame({"experience_id": list("abcd"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.0, 0.0]})
    >>> rows.pipe(pass_at_k(k=2))["advantage"].round(3).to_list()
    [1.0, -0.333, -0.333, -0.333]
    """
    n, failed = pl.col(_NUM), pl.col(_FAILED)
    mean = 1 - _share_of_sets(failed, n, k)
    # not n - 1: the sets are all that there are, not a sample of them
    std = (mean * (1 - mean)).sqrt()
    with_failed = 1 - _share_of_sets(failed - 1, n - 1, k - 1)
    own = pl.when(reward > threshold).then(1.0).otherwise(with_failed)
    credit = pl.when((n >= k) & (std > 0)).then((own - mean) * inverse(std)).otherwise(0.0)

    def set_advantage(frame: pl.LazyFrame) -> pl.LazyFrame:
        num_failed = _num_rewards() - _num_passed(threshold)
        counted = frame.with_columns(_num_rewards().alias(_NUM), num_failed.alias(_FAILED))
        return counted.with_columns(advantage(credit)).drop(_NUM, _FAILED)

    return set_advantage


_NUM, _FAILED = "rewards_of_the_group", "failed_of_the_group"


def _num_rewards() -> pl.Expr:
    return reward.count().over(GROUP).cast(pl.Float64)


def _num_passed(threshold: float) -> pl.Expr:
    return (reward > threshold).sum().over(GROUP).cast(pl.Float64)


def _share_of_sets(few: pl.Expr, many: pl.Expr, size: int) -> pl.Expr:
    """Return C(few, size) / C(many, size), factor by factor, so that nothing overflows."""
    factors = [(few - i).clip(lower_bound=0.0) / (many - i) for i in range(size)]
    return reduce(mul, factors, pl.lit(1.0))
