"""Advantages from the rewards of a row's group."""

from typing import Literal

import polars as pl

from ..body import Declared
from ..decorator import operator
from ..parameters import Positive
from ..statistics import GROUP, advantage, centered, differ, inverse, listed, mean, reward, zscore


@operator("derive", whole_groups=True)
def group_zscore(
    *, epsilon: float = 1e-6, std: Literal["group", "batch"] = "group"
) -> pl.Expr | Declared:
    """Set `advantage` to (reward - mean) / (std + epsilon) of its group (GRPO, arXiv:2402.03300).

    With `std="batch"` it is the deviation of all rows' rewards, the mean that of the group
    (arXiv:2508.08221).

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "group_id": "g", "reward": [1.0, 0.0]})
    >>> rows.pipe(group_zscore(epsilon=0.0))["advantage"].round(3).to_list()
    [0.707, -0.707]
    """
    if std == "group":
        return advantage(zscore(reward, GROUP, epsilon=epsilon))
    scaled = centered(reward, GROUP) * inverse(listed(reward).std(ddof=1) + epsilon)
    return Declared(
        body=advantage(pl.when(differ(reward, GROUP)).then(scaled).otherwise(0.0)), scope="all"
    )


@operator("derive", whole_groups=True)
def group_centered(*, shift: float = 0.0) -> pl.Expr:
    """Set `advantage` to the reward less its group's mean, which is moved by `shift` before.

    Without a shift: Dr. GRPO (arXiv:2503.20783), and OPMD with the mean as its baseline
    (arXiv:2505.17826). With one, AsymRE (arXiv:2506.20520): below 0, such as -0.1, good answers
    count more than bad ones, and each answer of a group of equal rewards gets -shift.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "group_id": "g", "reward": [1.0, 0.0]})
    >>> rows.pipe(group_centered())["advantage"].to_list()
    [0.5, -0.5]
    >>> rows.pipe(group_centered(shift=-0.25))["advantage"].to_list()
    [0.75, -0.25]
    """
    return advantage(centered(reward, GROUP) - shift)


@operator("derive", whole_groups=True)
def group_amplified(*, alpha: Positive = 3.0, solved: float | None = None) -> pl.Expr:
    """Set `advantage` to the reward less its group's mean, times `alpha` where that is positive.

    Positive amplification (R3L, arXiv:2601.03715). With `solved`, a reward of at least that has
    the advantage 1, whatever its group, as in the authors' code.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "group_id": "g", "reward": [1.0, 0.0]})
    >>> rows.pipe(group_amplified())["advantage"].to_list()
    [1.5, -0.5]
    """
    # before the mean of a group changes: negative advantages keep their size
    apart = centered(reward, GROUP)
    made = pl.when(apart > 0).then(alpha * apart).otherwise(apart)
    if solved is not None:
        made = pl.when(reward >= solved).then(1.0).otherwise(made)
    return advantage(made)


@operator("derive", whole_groups=True)
def leave_one_out() -> pl.Expr:
    """Set `advantage` to the reward less its group's other rewards' mean (RLOO, arXiv:2402.14740).

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "group_id": "g",
    ...                      "reward": [1.0, 0.0, 0.5]})
    >>> rows.pipe(leave_one_out())["advantage"].to_list()
    [0.75, -0.75, 0.0]
    """
    num_others = reward.count().over(GROUP).cast(pl.Float64) - 1
    # the mean of the others lies as far on the other side of the mean of all, divided by them
    apart = centered(reward, GROUP)
    gain = apart + apart * inverse(num_others)
    return advantage(pl.when(num_others > 0).then(gain).otherwise(0.0))


@operator("derive", whole_groups=True)
def log_mean_exp(*, tau: Positive = 1.0) -> pl.Expr:
    """Set `advantage` to the reward less tau * log(mean(exp(reward / tau))) of its group.

    The baseline of OPMD that follows from its regularized objective (arXiv:2505.17826, as in Kimi
    k1.5, arXiv:2501.12599): near the best reward for a small `tau`, near the mean for a large one.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "group_id": "g", "reward": [1.0, 0.0]})
    >>> rows.pipe(log_mean_exp(tau=1.0))["advantage"].round(3).to_list()
    [0.38, -0.62]
    """
    top = reward.max().over(GROUP)
    scaled = ((reward - top) / tau).exp()  # less the largest, so that none overflows
    baseline = top + tau * mean(scaled, GROUP).log()
    return advantage(pl.when(differ(reward, GROUP)).then(reward - baseline).otherwise(0.0))


@operator("derive", whole_groups=True)
def above_greedy() -> pl.Expr:
    """Set `advantage` to the reward less that of its group's greedy row (ReMax, arXiv:2310.10505).

    The greedy row has `is_greedy` in its `metrics`, set by the explorer. If a group has none, or
    its reward is NULL, no row of the group has an advantage.

    >>> greedy = [[], [{"name": "is_greedy", "value": 1.0}]]
    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "group_id": "g", "reward": [1.0, 0.25],
    ...                      "metrics": greedy})
    >>> rows.pipe(above_greedy())["advantage"].to_list()
    [0.75, 0.0]
    """
    names = pl.col("metrics").list.eval(pl.element().struct.field("name"))
    is_greedy = names.list.contains("is_greedy").fill_null(value=False)
    return advantage(reward - pl.when(is_greedy).then(reward).max().over(GROUP))
