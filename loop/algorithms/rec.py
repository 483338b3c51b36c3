"""Group-relative REINFORCE on rows of any policy (REC), arXiv:2509.24203.

REINFORCE with the group's mean as its baseline is an off-policy algorithm of its own: it needs no
importance weights, but regularized updates and well-chosen rows. Its variants: clipping, as a mask
on the tokens whose ratio left a range (`two-sided`; `one-sided`, as in PPO; `one-sided-sequence`,
by the answer's ratio, as in GSPO; `ring`, which keeps tokens far outside if the update moves them
back); weights (`importance`: pi/pi_old; `sequence-importance`; `advantage`: RED-Weight); answers
left out (`drop: balance`: RED-Drop); a regularizer (`k2`: OPMD's; `forward-kl`: AsymRE's). Assumes
that rewards of one group are comparable.

Unlike in Trinity-RFT, `normalize: std` divides by the deviation with n - 1, as GRPO does,
and not with n: advantages here are sqrt((n - 1) / n) of those (0.707 for two answers, 0.935 for
eight). `k2` has the factor 1/2: a `coef` of 0.5 there is one of 1 here. An answer that is alone in
its group has advantage 0, where Trinity-RFT raises an error.

Metrics: `train/clip_fraction` is the share of tokens that the mask leaves out.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...operators import Operator, balanced
from ..losses import NonNegative, PolicyGradient, Positive
from ..losses.algorithm import bounded
from ..losses.batch import Batch
from ..losses.policy_gradient import ratio


@dataclass(frozen=True, kw_only=True)
class REC(PolicyGradient):
    """Log-probabilities of tokens times advantage, masked, weighted and regularized."""

    clipping: Literal["none", "two-sided", "one-sided", "one-sided-sequence", "ring"] = "one-sided"
    """Which tokens are masked."""
    clip: Positive = 0.2
    """How far below 1 a ratio may be."""
    clip_high: Positive = 0.2
    """How far above 1."""
    outer: Positive = 0.6
    """How far below 1 a token with a positive advantage is kept again (`ring`)."""
    outer_high: Positive = 2.0
    """How far above 1 a token with a negative advantage is kept again (`ring`)."""
    weighting: Literal["none", "importance", "sequence-importance", "advantage"] = "none"
    """Factor of the advantage: 1, a ratio, or exp(advantage / temperature)."""
    temperature: Positive = 1.0
    """Temperature of `weighting: advantage`."""
    regularizer: Literal["none", "k2", "forward-kl"] = "none"
    """Term added to a token's loss: half its squared log-ratio, or -log pi."""
    coef: NonNegative = 0.0
    """Weight of the regularizer."""
    drop: Literal["none", "balance"] = "none"
    """Whether answers below their group's mean are dropped until they are at most half."""
    normalize: Literal["none", "std"] = "none"
    """Whether advantages are divided by the deviation of the group."""

    def advantage(self) -> Operator:
        """Reward minus the mean of the kept answers of its group."""
        return super().advantage() or balanced(drop=self.drop, normalize=self.normalize)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probability times weighted advantage of tokens in range, negated."""
        fixed_BT = logprobs_BT.detach()
        ratio_BT = ratio(batch, fixed_BT, old_BT)
        mean_B = bounded(batch.mean_tokens(fixed_BT - old_BT))
        sequence_BT = mean_B.exp()[:, None].expand_as(ratio_BT)
        is_in_BT = self._is_in(ratio_BT, sequence_BT, batch.advantage_BT).to(ratio_BT.dtype)
        credit_BT = self._weighted(batch.advantage_BT, ratio_BT, sequence_BT)
        losses_BT = -credit_BT * is_in_BT * logprobs_BT
        if self.regularizer == "k2":
            apart_BT = (logprobs_BT - old_BT) * batch.mask_BT
            losses_BT = losses_BT + self.coef * 0.5 * apart_BT.square()
        if self.regularizer == "forward-kl":
            losses_BT = losses_BT - self.coef * logprobs_BT
        return losses_BT, {"clip_fraction": batch.token_mean(1 - is_in_BT)}

    def _is_in(self, ratio_BT: Tensor, sequence_BT: Tensor, advantage_BT: Tensor) -> Tensor:
        if self.clipping == "none":
            return torch.ones_like(ratio_BT, dtype=torch.bool)
        value_BT = sequence_BT if self.clipping == "one-sided-sequence" else ratio_BT
        above_BT, below_BT = value_BT <= 1 + self.clip_high, value_BT >= 1 - self.clip
        if self.clipping.startswith("one-sided"):
            return (above_BT & (advantage_BT >= 0)) | (below_BT & (advantage_BT <= 0))
        if self.clipping == "two-sided":
            return above_BT & below_BT
        pulled_up_BT = (advantage_BT >= 0) & (value_BT <= 1 - self.outer)
        pulled_down_BT = (advantage_BT <= 0) & (value_BT >= 1 + self.outer_high)
        return (above_BT & below_BT) | pulled_up_BT | pulled_down_BT

    def _weighted(self, advantage_BT: Tensor, ratio_BT: Tensor, sequence_BT: Tensor) -> Tensor:
        if self.weighting == "importance":
            return advantage_BT * ratio_BT
        if self.weighting == "sequence-importance":
            return advantage_BT * sequence_BT
        if self.weighting == "advantage":
            return advantage_BT * (advantage_BT / self.temperature).exp()
        return advantage_BT
