"""GRPO done right (Dr. GRPO), arXiv:2503.20783.

GRPO without its two biases: advantages are not divided by the group's deviation, which gives more
weight to easy and hard tasks, and losses are not divided by a sequence's length, which penalizes
long wrong answers less. Assumes what GRPO does. As in the paper's formula a sequence's losses are
summed; its code and others divide by a constant, the token limit of an answer:
`aggregation: seq-mean-token-sum-norm` with that as `norm`.

Metrics: those of GRPO.
"""

from dataclasses import dataclass

from ..losses import Aggregation, Credit
from .grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """Clipped policy gradient with rewards minus their group's mean, summed over sequences."""

    aggregation: Aggregation = "seq-mean-token-sum"
    credit: Credit = "group_centered"
    """Reward minus the mean of its group."""
