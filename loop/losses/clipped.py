"""The clipped surrogate that several policy-gradient algorithms share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .algorithm import Positive
from .batch import Batch
from .policy_gradient import PolicyGradient, ratio


@dataclass(frozen=True, kw_only=True)
class Clipped(PolicyGradient):
    """Ratio times advantage, with a clipped ratio (arXiv:1707.06347, equation 7).

    Metrics of all: `train/clip_fraction` is the share of tokens whose ratio left the trusted range
    on the side where that stops the gradient.
    """

    clip: Positive = 0.2
    """How far below 1 the ratio may push."""
    clip_high: Positive | None = None
    """How far above 1; None: as far as below."""

    def ratio(self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor) -> Tensor:
        """Return the ratio of each trained token: [B, T]."""
        return ratio(batch, logprobs_BT, old_BT)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate, negated."""
        ratio_BT, advantage_BT = self.ratio(batch, logprobs_BT, old_BT), batch.advantage_BT
        low, high = self.clip, self.clip if self.clip_high is None else self.clip_high
        bounded_BT = ratio_BT.clamp(1 - low, 1 + high)
        # The smaller of both, not the clipped one alone: a token that an update has pushed the
        # wrong way keeps the gradient that brings it back.
        gain_BT = torch.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
        up_BT = (ratio_BT > 1 + high) & (advantage_BT > 0)
        down_BT = (ratio_BT < 1 - low) & (advantage_BT < 0)
        stopped = batch.token_mean((up_BT | down_BT).to(ratio_BT.dtype))
        return -gain_BT, {"clip_fraction": stopped}
