"""Asymmetric REINFORCE (AsymRE), arXiv:2506.20520.

REINFORCE on rows of other policies, uncorrected, with a baseline slightly below the group's mean
reward: good answers then count more than bad ones, and training does not collapse, as it finally
does with a baseline at or above the mean. Assumes that rows stay useful although another policy
sampled them. The paper's V is the mean; `shift` is its delta V.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass

from ...operators import Operator, group_centered
from ..losses import Unclipped


@dataclass(frozen=True, kw_only=True)
class AsymRE(Unclipped):
    """Log-probabilities of tokens times rewards less a low baseline."""

    shift: float = -0.1
    """How far the baseline is above the group's mean reward; below if negative."""

    def advantage(self) -> Operator:
        """Reward minus its group's mean plus `shift`."""
        return group_centered(shift=self.shift)
