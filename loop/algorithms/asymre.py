"""Asymmetric REINFORCE (AsymRE), arXiv:2506.20520.

REINFORCE on rows of other policies, uncorrected, with a baseline that lies a little below the
group's mean reward: then good answers count more than bad ones, and training does not collapse, as
it does in the end with a baseline at or above the mean. Assumes that rows stay useful although
another policy wrote them. The paper's V is the mean; `shift` is its delta V.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass

from torch import Tensor

from ...operators import Operator, group_centered
from ..losses import Aggregation, PolicyGradient
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class AsymRE(PolicyGradient):
    """Log-probabilities of tokens times rewards less a low baseline."""

    shift: float = -0.1
    """How far the baseline lies above the group's mean reward; below it when negative."""
    aggregation: Aggregation = "seq-mean-token-sum"
    """How losses of tokens become one number."""

    def advantage(self) -> Operator:
        """Reward less its group's mean, which is moved by `shift` before."""
        return group_centered(shift=self.shift)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probability times advantage, negated."""
        del old_BT  # who wrote the rows does not matter
        return -batch.advantage_BT * logprobs_BT, {}
