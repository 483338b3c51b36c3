"""Soft adaptive policy optimization (SAPO), arXiv:2511.20347.

A smooth gate for the clip: maximize sigmoid(tau * (ratio - 1)) * 4 / tau times the advantage, whose
gradient is that of the policy gradient on policy and fades as the ratio leaves 1, faster for
negative advantages, which raise many unlikely tokens at once. Assumes what GRPO does. Some
implementations multiply log-probabilities by the gate itself, which does not fade as the ratio
grows.

Metrics: `train/gate` is the mean weight of trained tokens in the gradient, 1 on policy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses import Aggregation, Credit, PolicyGradient, Positive
from ..losses.batch import Batch
from ..losses.policy_gradient import ratio


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyGradient):
    """Policy gradient with a soft gate."""

    tau: Positive = 1.0
    """How fast the gate closes for positive advantages."""
    tau_negative: Positive = 1.05
    """How fast it closes for other advantages."""
    aggregation: Aggregation = "seq-mean-token-mean"
    credit: Credit = "group_zscore"
    """Reward in standard deviations above the mean of its group."""

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Gated surrogate, negated."""
        ratio_BT, advantage_BT = ratio(batch, logprobs_BT, old_BT), batch.advantage_BT
        tau_BT = torch.full_like(ratio_BT, self.tau_negative)
        tau_BT = tau_BT.masked_fill(advantage_BT > 0, self.tau)
        open_BT = torch.sigmoid(tau_BT * (ratio_BT - 1))
        gate_BT = (4 * open_BT * (1 - open_BT) * ratio_BT).detach()
        return -4 / tau_BT * open_BT * advantage_BT, {"gate": batch.token_mean(gate_BT)}
