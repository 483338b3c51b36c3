"""Online policy mirror descent (OPMD), arXiv:2505.17826 and, in Kimi k1.5, arXiv:2501.12599.

Maximize the reward minus `tau` times the divergence from the policy before the step. One step of
that is a policy gradient with the group's baseline, divided by 1 + tau; it does not depend on the
policy that sampled a row, so rows of older policies need no correction. Assumes that the updates of
a step stay near the policy before it.

An answer that is alone in its group has advantage 0 with either baseline, which is its own reward.
In Trinity-RFT its baseline is 0, and its advantage its whole reward.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...operators import Operator, group_centered, log_mean_exp
from ..losses import Positive, Unclipped
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class OPMD(Unclipped):
    """Log-probabilities of tokens times rewards minus a baseline, damped."""

    baseline: Literal["mean", "log_mean_exp"] = "mean"
    """Of the group: the mean reward, or tau * log(mean(exp(reward / tau)))."""
    tau: Positive = 1.0
    """Penalty per nat of divergence from the policy before the step."""

    def advantage(self) -> Operator:
        """Reward minus the baseline of its group."""
        own = group_centered() if self.baseline == "mean" else log_mean_exp(tau=self.tau)
        return super().advantage() or own

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probability times advantage, negated and divided by 1 + tau."""
        losses_BT, metrics = super().surrogate(batch, logprobs_BT, old_BT)
        return losses_BT / (1 + self.tau), metrics
