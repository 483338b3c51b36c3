"""Softmax policy optimization with a clip (sPPO), arXiv:2108.05828.

Seen as a softmax over tokens, a policy is improved by functional mirror ascent on advantage times
log-ratio, where PPO has advantage times ratio. The ratio is clipped to [1 / (1 + epsilon),
1 + epsilon], whatever the sign of the advantage. Assumes what GRPO does.

Metrics: `train/clip_fraction` is the share of tokens whose ratio left that range.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from ..losses import Credit, PolicyGradient, Positive
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class SPPO(PolicyGradient):
    """Clipped log-ratios times advantage."""

    epsilon: Positive = 0.3
    """How far a ratio may go: up to 1 + epsilon, and down to 1 / (1 + epsilon)."""
    credit: Credit = "group_centered"
    """Reward minus the mean of its group."""

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped log-ratio times advantage, negated."""
        limit = math.log1p(self.epsilon)
        apart_BT = logprobs_BT - old_BT
        is_out_BT = (apart_BT.detach().abs() > limit).to(apart_BT.dtype)
        stopped = batch.token_mean(is_out_BT)
        return -apart_BT.clamp(-limit, limit) * batch.advantage_BT, {"clip_fraction": stopped}
