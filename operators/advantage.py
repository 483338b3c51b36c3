"""Advantages: credit for each row, from the rewards of its whole group.

A reward that is NULL was not computed: the row is kept out of its group's statistics and gets no
advantage. A group with one reward, or with equal rewards, says nothing: its advantages are 0.

The same rows give the same bits, in whatever order they come and whichever engine runs.
"""

import polars as pl

from .decorator import operator

_REWARD = pl.col("reward")
_GROUP = "group_id"
# Polars' streaming engine adds floats up in another order each time, but never those of a list
_REWARDS = _REWARD.implode().list.drop_nulls().list.sort().list


def _says_something() -> pl.Expr:
    # exact, where a standard deviation or a mean leaves rounding errors
    return _REWARD.max().over(_GROUP) > _REWARD.min().over(_GROUP)


def _credit(value: pl.Expr) -> pl.Expr:
    credit = pl.when(_says_something()).then(value).otherwise(0.0)
    return pl.when(_REWARD.is_not_null()).then(credit).alias("advantage")


@operator("derive", whole_groups=True)
def group_zscore(*, epsilon: float = 1e-6) -> pl.Expr:
    """Set `advantage` to (reward - mean) / (std + epsilon) of its group (GRPO, arXiv:2402.03300).

    `std` is the sample standard deviation (divisor n - 1), as in the view `groups`.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "group_id": "g", "reward": [1.0, 0.0]})
    >>> rows.pipe(group_zscore(epsilon=0.0))["advantage"].round(3).to_list()
    [0.707, -0.707]
    """
    mean, std = _REWARDS.mean().over(_GROUP), _REWARDS.std(ddof=1).over(_GROUP)
    return _credit((_REWARD - mean) / (std + epsilon))


@operator("derive", whole_groups=True)
def leave_one_out() -> pl.Expr:
    """Set `advantage` to the reward less its group's other rewards' mean (RLOO, arXiv:2402.14740).

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.5]})
    >>> rows.pipe(leave_one_out())["advantage"].to_list()
    [0.75, -0.75, 0.0]
    """
    others = (_REWARDS.sum().over(_GROUP) - _REWARD) / (_REWARD.count().over(_GROUP) - 1)
    return _credit(_REWARD - others)
