"""Odds ratio preference optimization (ORPO), arXiv:2403.07691.

One stage instead of two: imitate the chosen answers, and lower the odds of the rejected ones with
-log sigmoid(log odds(chosen) - log odds(rejected)), where odds(y) = P(y) / (1 - P(y)) and log
P(y) is the mean log-prob of the answer's tokens (equations 4 to 7). No reference policy.

The first part is, as in the paper, the mean negative log-likelihood of each chosen answer's tokens.

Metrics are those of `Pairwise`; the implicit reward of a row is its log odds. `train/nll` is the
mean of the chosen rows' mean negative log-likelihoods, in nats a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..losses import Loss, NonNegative
from ..losses.batch import Batch
from ..losses.preference import Pairwise, Sides, sides


@dataclass(frozen=True, kw_only=True)
class ORPO(Pairwise):
    """Imitation of the chosen answers, and a logistic loss of log odds."""

    ratio_coef: NonNegative = 0.1
    """Weight of the odds ratio's loss relative to the imitation loss (the paper's lambda)."""

    def rewards(self, batch: Batch, logprobs_BT: Tensor) -> Tensor:
        """Log odds."""
        logp_B = batch.mean_tokens(logprobs_BT)
        certain_B = logp_B.clamp(max=-torch.finfo(logp_B.dtype).eps)  # the odds of 1 are infinite
        return logp_B - torch.log(-torch.expm1(certain_B))

    def losses(self, rewards: Sides) -> Tensor:
        """Logistic loss of the log odds ratio, times its weight."""
        return -self.ratio_coef * logsigmoid(rewards.margin_P)

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Add imitation."""
        ranked = super().loss(batch, logprobs_BT)
        nll_P = -sides(batch.mean_tokens(logprobs_BT)).chosen_P
        value = ranked.value + batch.row_mean(nll_P * sides(batch.weight_B).chosen_P)
        return Loss(value, {**ranked.metrics, "nll": batch.row_mean(nll_P.detach())})
