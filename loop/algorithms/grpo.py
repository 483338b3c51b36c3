"""Group Relative Policy Optimization (GRPO), arXiv:2402.03300.

Try each task several times; credit each try with how far its reward lies above the mean of its
group, in standard deviations; take a clipped policy-gradient step with ratios of token
probabilities. Assumes that rewards of one group are comparable, and that the behaviour policy's
log-probs were kept as sampled. There is no KL penalty to a reference model here (the paper's beta
is 0), so that no second model is held.

Metrics: `train/ratio` is the mean of pi/pi_old over trained tokens; `train/clip_fraction` the share
of tokens whose ratio left the trusted range on the side where that stops the gradient; `train/kl`
the k3 estimate of KL(pi_old || pi), in nats a token; `train/entropy` the mean of -log pi of the
sampled tokens, which estimates the entropy on policy.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...operators import Operator, group_zscore
from ..batch import Batch
from .algorithm import Aggregation, Count, Loss, Positive, aggregate


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Clipped policy gradient with advantages relative to the group."""

    grouped: ClassVar[bool] = True
    needs_logprobs: ClassVar[bool] = True

    group_size: Count = 8
    """Tries at each task."""
    clip: Positive = 0.2
    """How far below 1 the ratio may push."""
    clip_high: Positive | None = None
    """How far above 1; None: as far as below."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """How losses of tokens become one number."""
    norm: Positive | None = None
    """The constant of seq-mean-token-sum-norm."""

    def advantage(self) -> Operator:
        """Reward in standard deviations above the mean of its group."""
        return group_zscore()

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Clipped surrogate, negated."""
        log_ratio_BT = (logprobs_BT - batch.logprobs_BT) * batch.mask_BT
        ratio_BT = log_ratio_BT.exp()
        high = self.clip if self.clip_high is None else self.clip_high
        clipped_BT = ratio_BT.clamp(1 - self.clip, 1 + high)
        gain_BT = torch.minimum(ratio_BT * batch.advantage_BT, clipped_BT * batch.advantage_BT)
        with torch.no_grad():
            stopped_BT = (clipped_BT * batch.advantage_BT < ratio_BT * batch.advantage_BT).float()
            metrics = {
                "ratio": batch.token_mean(ratio_BT),
                "clip_fraction": batch.token_mean(stopped_BT),
                "kl": batch.token_mean(ratio_BT - 1 - log_ratio_BT),
                "entropy": batch.token_mean(-logprobs_BT),
            }
        return Loss(aggregate(-gain_BT, batch, self.aggregation, norm=self.norm), metrics)
