"""Supervised fine-tuning (SFT): maximize the log-likelihood of stored answers.

Needs neither rewards nor advantages: the draw decides what is trained on. Assumes that every drawn
row is worth imitating. With `weighting: probability` each token is weighted by its probability
under the policy, without gradient: dynamic fine-tuning (DFT, arXiv:2508.05629). This removes the
implicit reward of SFT, seen as policy gradient, which is higher for less likely tokens.

Metrics: `train/nll` is the mean negative log-likelihood of a trained token, in nats, however it is
weighted.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..losses import Aggregation, Algorithm, Loss, Positive, aggregate
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm):
    """Negative log-likelihood of the trained tokens."""

    likelihoods_at: ClassVar[float | None] = 1.0

    weighting: Literal["none", "probability"] = "none"
    """Factor of a token's loss: 1, or the policy's probability of it."""
    aggregation: Aggregation = "token-mean"
    """How losses of tokens are reduced to one number."""
    norm: Positive | None = None
    """The constant of seq-mean-token-sum-norm."""

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Cross-entropy, weighted."""
        fixed_BT = logprobs_BT.detach()
        losses_BT = -logprobs_BT * (fixed_BT.exp() if self.weighting == "probability" else 1.0)
        value = aggregate(losses_BT, batch, self.aggregation, norm=self.norm)
        return Loss(value, {"nll": batch.token_mean(-fixed_BT)})
