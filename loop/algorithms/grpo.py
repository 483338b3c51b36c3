"""Group Relative Policy Optimization (GRPO), arXiv:2402.03300.

Sample several rollouts of each task; the advantage of a rollout is how far its reward lies above
the mean of its group, in standard deviations; take a clipped policy-gradient step with ratios of
token probabilities. Assumes that rewards of one group are comparable, and that the behavior
policy's log-probs were stored as sampled. By default the KL penalty is off (the paper's beta is 0),
so no reference model is loaded.

Metrics: `train/clip_fraction` is the share of tokens whose ratio left the trusted range on the side
where that stops the gradient; `train/dual_clip_fraction` that of tokens which `dual_clip` stops;
`train/sequence_mask_fraction` that of tokens which `sequence_mask` leaves out.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ..losses import Aggregation, Clipped, Credit, Positive
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class GRPO(Clipped):
    """Clipped policy gradient with advantages relative to the group."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Ratio above which a negative advantage has no gradient (arXiv:1912.09729); None: no limit."""
    sequence_mask: Positive | None = None
    """Mean of log pi_old/pi above which a sequence with negative advantage is left out, in nats per
    token (arXiv:2512.02556, section 3.1); pi_old is always the policy that sampled the sequence.
    None: no sequence is left out."""
    aggregation: Aggregation = "seq-mean-token-mean"
    credit: Credit = "group_zscore"
    """Reward in standard deviations above the mean of its group."""

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped surrogate, negated."""
        losses_BT, metrics = super().surrogate(batch, logprobs_BT, old_BT)
        gain_BT, advantage_BT = -losses_BT, batch.advantage_BT
        if self.dual_clip is not None:
            least_BT = self.dual_clip * advantage_BT
            is_low_BT = (advantage_BT < 0) & (gain_BT < least_BT)
            # `least_BT` does not depend on the policy: where it is chosen, the gradient stops
            gain_BT = torch.where(is_low_BT, least_BT, gain_BT)
            metrics["dual_clip_fraction"] = batch.token_mean(is_low_BT.to(gain_BT.dtype))
        if self.sequence_mask is not None:
            apart_B = batch.mean_tokens(batch.logprobs_BT - logprobs_BT.detach())
            is_out_BT = (apart_B > self.sequence_mask)[:, None] & (advantage_BT < 0)
            gain_BT = torch.where(is_out_BT, 0.0, gain_BT)
            metrics["sequence_mask_fraction"] = batch.token_mean(is_out_BT.to(gain_BT.dtype))
        return -gain_BT, metrics
