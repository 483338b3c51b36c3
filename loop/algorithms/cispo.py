"""Clipped importance-sampling policy optimization (CISPO), arXiv:2506.13585.

Clip the weight of a token, not its gradient: the loss of every token is its log-probability times
its advantage times its ratio pi/pi_old, which is clipped and has no gradient. So rare tokens that
steer an answer still learn after the first update. Assumes what GRPO does.

Metrics: `train/clip_fraction` is the share of tokens whose ratio is clipped; `train/kept_fraction`
that of tokens which the mask keeps, if one is configured.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses import Credit, PolicyGradient, Positive
from ..losses.batch import Batch
from ..losses.policy_gradient import ratio


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyGradient):
    """Log-probabilities of tokens times advantage and clipped ratio."""

    clip: Positive | None = None
    """How far below 1 a ratio may be; None: without limit, as in the paper."""
    clip_high: Positive = 0.28
    """How far above 1 a ratio may be."""
    mask_low: Positive | None = None
    """How far below 1 tokens with a negative advantage are masked (the paper's unified form)."""
    mask_high: Positive | None = None
    """How far above 1 tokens with a positive advantage are masked."""
    credit: Credit = "group_zscore"
    """Reward in standard deviations above the mean of its group."""

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probability times advantage and clipped ratio, negated."""
        ratio_BT, advantage_BT = ratio(batch, logprobs_BT.detach(), old_BT), batch.advantage_BT
        low = 0.0 if self.clip is None else 1 - self.clip
        bounded_BT = ratio_BT.clamp(low, 1 + self.clip_high)
        metrics = {"clip_fraction": batch.token_mean((bounded_BT != ratio_BT).to(ratio_BT.dtype))}
        is_kept_BT = torch.ones_like(ratio_BT, dtype=torch.bool)
        if self.mask_low is not None:
            is_kept_BT &= (advantage_BT >= 0) | (ratio_BT >= 1 - self.mask_low)
        if self.mask_high is not None:
            is_kept_BT &= (advantage_BT <= 0) | (ratio_BT <= 1 + self.mask_high)
        if self.mask_low is not None or self.mask_high is not None:
            metrics["kept_fraction"] = batch.token_mean(is_kept_BT.to(ratio_BT.dtype))
        return -bounded_BT * advantage_BT * is_kept_BT * logprobs_BT, metrics
