"""Advantages that say no more than whether a row is wanted."""

import polars as pl

from ..decorator import operator
from ..statistics import advantage, reward


@operator("derive")
def desirability(*, above: float = 0.0) -> pl.Expr:
    """Set `advantage` to 1 where the reward is above a threshold, to -1 elsewhere.

    They are the labels of KTO (arXiv:2402.01306), desirable and undesirable. A row without a reward
    has none.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "reward": [1.0, 0.0, None]})
    >>> rows.pipe(desirability())["advantage"].to_list()
    [1.0, -1.0, None]
    """
    return advantage(pl.when(reward > above).then(1.0).when(reward <= above).then(-1.0))
