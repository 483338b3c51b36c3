"""Tapered off-policy REINFORCE (TOPR), arXiv:2503.14286.

Answers with a positive advantage count in full, whichever policy sampled them. Those with a
negative one are weighted by pi/pi_old of the whole answer, at most 1: once the policy no longer
generates them, they have no effect, which keeps training on stored rows stable. Assumes rewards on
both sides of `baseline`, such as 1 and -1 for right and wrong. Some implementations use each
token's own ratio instead of the answer's.

Metrics: `train/taper` is the mean weight of trained tokens.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...operators import Operator, reinforce
from ..losses import Aggregation, Count, PolicyGradient, Unit
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class TOPR(PolicyGradient):
    """Log-probabilities of tokens times the advantage, tapered where it is negative."""

    unit: ClassVar[Unit] = "row"

    group_size: Count = 8
    baseline: float | Literal["batch_mean"] = 0.0
    """A constant, or the mean of the step's rewards."""
    aggregation: Aggregation = "seq-mean-token-sum"

    def advantage(self) -> Operator:
        """Reward minus the baseline."""
        return super().advantage() or reinforce(baseline=self.baseline)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probability times tapered advantage, negated."""
        advantage_BT = batch.advantage_BT
        # At most 0 before `exp`, which would overflow for long answers.
        ratio_B = batch.sum_tokens(logprobs_BT.detach() - old_BT).clamp(max=0).exp()
        taper_BT = torch.where(advantage_BT < 0, ratio_B[:, None], 1.0)
        return -taper_BT * advantage_BT * logprobs_BT, {"taper": batch.token_mean(taper_BT)}
