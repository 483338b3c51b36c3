"""Reward-ranked fine-tuning (RAFT), arXiv:2304.06767: imitate the best rollout of each task.

Sample several rollouts of each task, keep the `best` of each group by reward, and take an SFT step
on them; the other rows have weight 0. Assumes that the best of a few rollouts is worth imitating;
`min_reward` leaves out groups whose best is not.

Metrics: those of SFT.
"""

from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from ...operators import Operator, operator
from ...operators.statistics import GROUP, reward
from ..losses import Count, Unit
from .sft import SFT


@dataclass(frozen=True, kw_only=True)
class RAFT(SFT):
    """Negative log-likelihood of the best rollouts of each group."""

    unit: ClassVar[Unit] = "group"

    group_size: Count = 8
    best: Count = 1
    """Number of rollouts per group that are imitated; of equal rewards the first."""
    min_reward: float | None = None
    """Smallest reward that is imitated; None: any."""

    def advantage(self) -> Operator:
        """1 for imitated rollouts, NULL for the others, which are left out."""
        return best_of_group(best=self.best, min_reward=self.min_reward)


@operator("derive", reads=("experience_id", GROUP, "reward"), whole_groups=True)
def best_of_group(*, best: int, min_reward: float | None) -> pl.Expr:
    """Set `advantage` to 1 for the best rows of each group, and to NULL for the others."""
    # The ID last, so that rewards that are equal do not leave the choice to the order of the rows.
    order = pl.struct(absent=reward.is_null(), cost=-reward, id="experience_id")
    place = order.rank("ordinal").over(GROUP)
    is_kept = reward.is_not_null() & (place <= best)
    if min_reward is not None:
        is_kept &= reward >= min_reward
    return pl.when(is_kept).then(1.0).alias("advantage")
