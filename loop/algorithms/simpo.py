"""Simple preference optimization (SimPO), arXiv:2405.14734.

No reference policy: the implicit reward of a row is beta times the mean log-prob of its tokens,
which also guides decoding, and that of the chosen row must be higher by `gamma`: the loss is -log
sigmoid(r_chosen - r_rejected - gamma) (equation 6). Only a small learning rate keeps the policy
near the initial one.

Metrics are those of `Pairwise`; the implicit reward of a row is beta times its mean log-prob.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from ..losses import NonNegative, Positive
from ..losses.batch import Batch
from ..losses.preference import Pairwise, Sides


@dataclass(frozen=True, kw_only=True)
class SimPO(Pairwise):
    """Logistic loss of the difference of mean log-probs, with a margin."""

    beta: Positive = 2.0
    """Implicit reward per nat of mean log-prob."""
    gamma: NonNegative = 1.0
    """Target margin of the chosen row; the best values in the paper are 0.3 to 0.8 times beta."""

    def rewards(self, batch: Batch, logprobs_BT: Tensor) -> Tensor:
        """Mean log-prob, times beta."""
        return self.beta * batch.mean_tokens(logprobs_BT)

    def losses(self, rewards: Sides) -> Tensor:
        """Logistic loss of the margin beyond gamma."""
        return -logsigmoid(rewards.margin_P - self.gamma)
