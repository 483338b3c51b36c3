"""Group sequence policy optimization (GSPO), arXiv:2507.18071.

Rewards are given to whole answers, so ratios are of whole answers too: the geometric mean of the
token ratios, clipped to a narrow range. This is the token form (the paper's GSPO-token), which has
the same value and gradient if all tokens of an answer have the same advantage. Assumes what GRPO
does.

Metrics: `train/clip_fraction` is the share of tokens in answers whose ratio left the trusted range
on the side where that stops the gradient.
"""

from dataclasses import dataclass

from torch import Tensor

from ..losses import Aggregation, Clipped, Credit, Positive
from ..losses.algorithm import bounded
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class GSPO(Clipped):
    """Policy gradient clipped by the ratio of whole answers."""

    clip: Positive = 3e-4
    clip_high: Positive | None = 4e-4
    aggregation: Aggregation = "seq-mean-token-mean"
    credit: Credit = "group_zscore"
    """Reward in standard deviations above the mean of its group."""

    def ratio(self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor) -> Tensor:
        """Return the ratio of each token's answer; its gradient is that of the token."""
        fixed_BT = logprobs_BT.detach()
        mean_B = batch.mean_tokens(fixed_BT - old_BT)
        # The first term is 0; it only carries the token's gradient.
        log_BT = (logprobs_BT - fixed_BT) * batch.mask_BT + mean_B[:, None]
        return bounded(log_BT).exp()
