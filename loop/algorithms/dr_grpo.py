"""GRPO done right (Dr. GRPO), arXiv:2503.20783.

GRPO without its two biases: advantages are not divided by the group's deviation, which weighs easy
and hard tasks up, and losses are not divided by a sequence's length, which lets long wrong answers
off lightly. Assumes what GRPO does. As in the paper's formula a sequence's losses are summed; its
code and others divide by a constant, the most tokens that are generated:
`aggregation: seq-mean-token-sum-norm` with that as `norm`.

Metrics: those of GRPO.
"""

from dataclasses import dataclass

from ...operators import Operator, group_centered
from ..losses import Aggregation
from .grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """Clipped policy gradient with rewards less their group's mean, of whole sequences."""

    aggregation: Aggregation = "seq-mean-token-sum"
    """How losses of tokens become one number."""

    def advantage(self) -> Operator:
        """Reward less the mean of its group."""
        return group_centered()
