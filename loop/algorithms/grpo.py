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

from ...operators.statistics import seeded_uniform
from ..losses import Aggregation, Clipped, Credit, Positive
from ..losses.batch import Batch, Examples


@dataclass(frozen=True, kw_only=True)
class GRPO(Clipped):
    """Clipped policy gradient with advantages relative to the group."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Ratio above which a negative advantage has no gradient (arXiv:1912.09729); None: no limit."""
    sequence_mask: Positive | None = None
    """Mean of log pi_old/pi above which a sequence with negative advantage is left out, in nats per
    token (arXiv:2512.02556, section 3.1); pi_old is always the policy that sampled the sequence.
    None: no sequence is left out."""
    repeat_groups: bool = False
    """Whether a group without any advantage gives its place in the step to a copy of another one,
    chosen at random (Polaris). Operators such as `drop_flat_groups` draw other groups instead."""
    aggregation: Aggregation = "seq-mean-token-mean"
    credit: Credit = "group_zscore"
    """Reward in standard deviations above the mean of its group."""

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Let groups with advantages count once more for each group without any."""
        rows = super().prepare(rows, companions)
        # Held-out rows have no group: they are only evaluated.
        return _repeated(rows) if self.repeat_groups and "group" in rows.rows else rows

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


def _repeated(rows: Examples) -> Examples:
    """Weigh rows so that each group without advantages is a copy of one with some.

    A copy of a row is the row with twice the weight, as losses add up.
    """
    advantage_R, group_R = rows.rows["advantage"], rows.rows["group"].long()
    # by first ids: the choice must depend neither on their numbers nor on the order of rows
    names: dict[int, str] = {}
    for group, name in zip(group_R.tolist(), rows.experience_ids, strict=True):
        names[group] = min(name, names.get(group, name))
    useful = sorted(set(group_R[advantage_R != 0].tolist()), key=names.__getitem__)
    times = {group: float(group in useful) for group in names}
    if not useful:
        return rows
    for group, name in names.items():
        if not times[group]:
            times[useful[int(seeded_uniform(0, name) * len(useful))]] += 1.0
    times_R = advantage_R.new_tensor([times[group] for group in group_R.tolist()])
    return rows.with_rows(weight=rows.rows["weight"] * times_R)
