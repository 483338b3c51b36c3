"""Supervised fine-tuning (SFT): maximise the log-likelihood of stored answers.

No credit, no reward: what is trained on is chosen by the rows that are drawn. Assumes that every
row drawn is worth imitating.

Metrics: `train/nll` is the mean negative log-likelihood of a trained token, in nats.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..batch import Batch
from .algorithm import Aggregation, Count, Loss, Positive, aggregate


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Negative log-likelihood of the trained tokens."""

    grouped: ClassVar[bool] = False
    needs_logprobs: ClassVar[bool] = False

    group_size: Count = 1
    """Tries at each task, when an explorer makes the rows."""
    aggregation: Aggregation = "token-mean"
    """How losses of tokens become one number."""
    norm: Positive | None = None
    """The constant of seq-mean-token-sum-norm."""

    def advantage(self) -> None:
        """No credit: rows are imitated as they are."""

    def loss(self, batch: Batch, logprobs_BT: Tensor) -> Loss:
        """Cross-entropy."""
        nll = batch.token_mean(-logprobs_BT.detach())
        return Loss(aggregate(-logprobs_BT, batch, self.aggregation, norm=self.norm), {"nll": nll})
