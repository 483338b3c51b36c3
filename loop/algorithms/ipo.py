"""Identity preference optimization (IPO), arXiv:2310.12036.

DPO assumes that a reward explains the preferences, and drives the log-ratio of a pair that is never
contradicted to infinity. IPO regresses it to a finite target: the loss of a pair is
(h - 1 / (2 beta))^2, where h is the difference of the rows' log(pi / pi_reference) (equation 17;
beta is the paper's tau).

The paper's log-ratios are sums over tokens; with `length` mean they are means, which its authors
recommend for language models and TRL uses, so that beta does not depend on the answers' lengths.

Metrics are those of `Pairwise`; the implicit reward of a row is beta log(pi / pi_reference).
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..losses import Positive
from ..losses.batch import Batch
from ..losses.preference import Pairwise, Sides


@dataclass(frozen=True, kw_only=True)
class IPO(Pairwise):
    """Squared distance of the difference of log-ratios from a finite target."""

    beta: Positive = 0.1
    """Larger values keep the policy nearer to the reference: the target difference is 1 / (2 beta).
    """
    length: Literal["mean", "sum"] = "mean"
    """How the log-ratios of tokens are reduced to one per row."""

    @property
    def needs(self) -> frozenset[str]:
        """The reference policy's log-probs."""
        return frozenset({"reference"})

    def rewards(self, batch: Batch, logprobs_BT: Tensor) -> Tensor:
        """Log-ratio to the reference, times beta."""
        ratio_BT = logprobs_BT - batch.tokens["reference"]
        is_mean = self.length == "mean"
        return self.beta * (batch.mean_tokens(ratio_BT) if is_mean else batch.sum_tokens(ratio_BT))

    def losses(self, rewards: Sides) -> Tensor:
        """Squared distance."""
        # `rewards` are times beta, and the target is a difference of log-ratios.
        return (rewards.margin_P / self.beta - 1 / (2 * self.beta)).square()
