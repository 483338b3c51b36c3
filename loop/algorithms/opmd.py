"""Online policy mirror descent (OPMD), arXiv:2505.17826 and, in Kimi k1.5, arXiv:2501.12599.

Maximise the reward less `tau` times the divergence from the policy before the step. One step of
that from there is a policy gradient with the group's baseline, divided by 1 + tau; it never asks
who wrote a row, so that it takes rows of older policies as they are. Assumes that the updates of a
step stay near the policy before it.

An answer that is alone in its group has advantage 0 by either baseline: the baseline is its own
reward. In Trinity-RFT its baseline is 0, and its advantage its whole reward.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...operators import Operator, group_centered, log_mean_exp
from ..losses import Aggregation, PolicyGradient, Positive
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class OPMD(PolicyGradient):
    """Log-probabilities of tokens times rewards less a baseline, damped."""

    baseline: Literal["mean", "log_mean_exp"] = "mean"
    """Of the group: the mean reward, or tau * log(mean(exp(reward / tau)))."""
    tau: Positive = 1.0
    """What a nat of divergence from the policy before the step costs."""
    aggregation: Aggregation = "seq-mean-token-sum"
    """How losses of tokens become one number."""

    def advantage(self) -> Operator:
        """Reward less the baseline of its group."""
        return group_centered() if self.baseline == "mean" else log_mean_exp(tau=self.tau)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probability times advantage, negated and divided by 1 + tau."""
        del old_BT  # who wrote the rows does not matter
        return -batch.advantage_BT * logprobs_BT / (1 + self.tau), {}
