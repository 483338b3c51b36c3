"""Advantages from the rewards of all rows, or from a row's own."""

from typing import Any, Literal

import polars as pl

from ..body import Declared
from ..decorator import operator
from ..statistics import (
    GROUP,
    advantage,
    centered,
    differ,
    finite,
    inverse,
    listed,
    reward,
    zero,
    zscore,
)


@operator("derive")
def reinforce(*, baseline: float | Literal["batch_mean"] = 0.0) -> pl.Expr:
    """Set `advantage` to the reward less a constant, or less the mean of all rows' rewards.

    Williams 1992 (REINFORCE); any baseline that does not depend on the answer leaves the gradient
    unbiased.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "reward": [1.0, 0.0]})
    >>> rows.pipe(reinforce(baseline=0.25))["advantage"].to_list()
    [0.75, -0.25]
    """
    return advantage(centered(reward) if baseline == "batch_mean" else reward - baseline)


@operator("derive")
def greedy_baseline(*, baseline: str) -> pl.Expr:
    """Set `advantage` to the reward less the column `baseline` (ReMax, arXiv:2310.10505).

    In the paper that is the reward of the task's greedy answer; any column that does not depend on
    the row's own answer will do. NULL where it is NULL, or no finite number.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "reward": [1.0, 0.0], "greedy": 0.75})
    >>> rows.pipe(greedy_baseline(baseline="greedy"))["advantage"].to_list()
    [0.25, -0.75]
    """
    return advantage(reward - finite(baseline))


@operator("derive")
def kto_advantage(*, above: float = 0.0) -> pl.Expr:
    """Set `advantage` to 1 where the reward is above a threshold, and to -1 elsewhere.

    These are the labels of KTO (arXiv:2402.01306), desirable and undesirable. A row without a
    reward has no advantage.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "reward": [1.0, 0.0, None]})
    >>> rows.pipe(kto_advantage())["advantage"].to_list()
    [1.0, -1.0, None]
    """
    return advantage(pl.when(reward > above).then(1.0).when(reward <= above).then(-1.0))


@operator("derive", scope="all")
def batch_zscore(
    *, per: Literal["row", "token"] = "row", epsilon: float = 1e-8
) -> pl.Expr | Declared:
    """Set `advantage` to (reward - mean) / (std + epsilon) of all rows.

    REINFORCE++ (arXiv:2501.03262) without its KL penalty, undiscounted: each token's return is the
    reward. With `per="token"` each row counts as often as it has trained tokens, as where
    advantages are normalized token by token; a row without a `loss_mask` is left out then.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "reward": [1.0, 0.0, 0.5]})
    >>> rows.pipe(batch_zscore(epsilon=0.0))["advantage"].to_list()
    [1.0, -1.0, 0.0]
    """
    return _normalized(reward, per, epsilon)


@operator("derive", whole_groups=True, scope="all")
def centered_batch_zscore(
    *, per: Literal["row", "token"] = "row", epsilon: float = 1e-8
) -> pl.Expr | Declared:
    """Set `advantage` to `batch_zscore` of the rewards less their group's mean.

    The REINFORCE++ with a baseline of arXiv:2501.03262, for several answers to each task.

    >>> rows = pl.DataFrame({"experience_id": list("abcd"), "group_id": list("gghh"),
    ...                      "reward": [1.0, 0.0, 9.0, 8.0]})
    >>> rows.pipe(centered_batch_zscore())["advantage"].round(3).to_list()
    [0.866, -0.866, 0.866, -0.866]
    """
    # a column of its own first: Polars takes no window within another
    return _normalized(centered(reward, GROUP), per, epsilon)


def _normalized(value: pl.Expr, per: str, epsilon: float) -> Declared:
    def set_advantage(frame: pl.LazyFrame) -> pl.LazyFrame:
        named = frame.with_columns(value.alias(_VALUE), _times(per).alias(_TIMES))
        scaled = _scaled(epsilon) if per == "token" else zscore(pl.col(_VALUE), epsilon=epsilon)
        return named.with_columns(advantage(scaled)).drop(_VALUE, _TIMES)

    reads = ["reward", *value.meta.root_names(), *_times(per).meta.root_names()]
    return Declared(body=set_advantage, reads=tuple(dict.fromkeys(reads)), writes=("advantage",))


_VALUE, _TIMES = "value_to_normalize", "times_it_counts"


def _times(per: str) -> pl.Expr:
    trained = pl.col("loss_mask").list.sum()
    return pl.when(trained > 0).then(trained) if per == "token" else pl.lit(1)


def _scaled(epsilon: float) -> pl.Expr:
    times = pl.col(_TIMES)
    value: Any = pl.when(times.is_not_null()).then(pl.col(_VALUE))
    count = pl.when(value.is_not_null()).then(times).sum()
    mean = listed(times * value).sum() / count
    # n - 1 with n tokens, as if each token were a row
    std = (listed(times * (value - mean) ** 2).sum() / (count - 1)).sqrt()
    return (
        pl.when(differ(value)).then((value - mean) * inverse(std + epsilon)).otherwise(zero(value))
    )
