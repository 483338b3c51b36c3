"""Second-moment trust policy optimization (M2PO), arXiv:2510.01161.

Rows may be many updates old if only their extreme tokens are masked. Of the tokens that a step
would move further from the policy that sampled them (ratio above 1 with a positive advantage, below
1 with a negative one), those with the largest squared log-ratio are masked until the mean of the
others is at most `threshold`. All others are trained without a clip. The mask is computed once over
the whole step, with the policy before it. Assumes what GRPO does. The released code clips ratios at
the bound found this way, where the paper masks.

Metrics: `train/kept_fraction` is the share of trained tokens that are kept; `train/second_moment`
the mean squared log-ratio over trained tokens before the step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..losses import Credit, NonNegative, PolicyGradient
from ..losses.batch import Batch, Examples
from ..losses.policy_gradient import ratio


@dataclass(frozen=True, kw_only=True)
class M2PO(PolicyGradient):
    """Policy gradient without the tokens that are furthest off policy."""

    threshold: NonNegative = 0.04
    """Largest mean squared log-ratio of the tokens that a step would move further away."""
    credit: Credit = "group_zscore"
    """Reward in standard deviations above the mean of its group."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that it reads."""
        return super().needs | {"logprobs", "proximal"}

    def prepare(self, rows: Examples, companions: Examples | None = None) -> Examples:
        """Add the mask of kept tokens, and each token's squared log-ratio."""
        rows = super().prepare(rows, companions)
        mask_N = rows.tokens["mask"]
        apart_N = (rows.tokens["proximal"].double() - rows.tokens["logprobs"].double()) * mask_N
        pushed_N = apart_N * rows.rows["advantage"][rows.row_N] > 0
        moment_N = apart_N.square()
        is_out_N = pushed_N & (moment_N >= _limit(moment_N[pushed_N], self.threshold))
        kind = mask_N.dtype
        return rows.with_tokens(kept=(~is_out_N).to(kind), second_moment=moment_N.to(kind))

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Ratio times advantage of the tokens that are kept, negated."""
        kept_BT = batch.tokens["kept"]
        gain_BT = ratio(batch, logprobs_BT, old_BT) * batch.advantage_BT
        return torch.where(kept_BT > 0, -gain_BT, 0.0), {
            "kept_fraction": batch.token_mean(kept_BT),
            "second_moment": batch.token_mean(batch.tokens["second_moment"]),
        }


def _limit(moment_M: Tensor, threshold: float) -> float:
    """Return the smallest value to mask so that the mean of smaller ones is within the limit."""
    ordered_M = moment_M.sort().values
    means_M = ordered_M.cumsum(0) / torch.arange(1, len(ordered_M) + 1)
    place = int((means_M <= threshold).sum())
    return float(ordered_M[place]) if place < len(ordered_M) else float("inf")
