"""Simple preference optimization (SimPO), arXiv:2405.14734.

No reference policy: a row is worth beta times the mean log-prob of its tokens, which is what
decoding goes by, and the chosen one must be worth `gamma` more than the rejected one: the loss is
-log sigmoid(r_chosen - r_rejected - gamma) (equation 6). Nothing but a small learning rate keeps
the policy near to what it started from.

Metrics are those of `Pairwise`; what a row is worth is beta times its mean log-prob.
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
    """What a nat a token is worth."""
    gamma: NonNegative = 1.0
    """How much more the chosen row shall be worth; the paper's best are 0.3 to 0.8 times beta."""

    def rewards(self, batch: Batch, logprobs_BT: Tensor) -> Tensor:
        """Mean log-prob, times beta."""
        return self.beta * batch.mean_tokens(logprobs_BT)

    def losses(self, rewards: Sides) -> Tensor:
        """Logistic loss of the margin beyond gamma."""
        return -logsigmoid(rewards.margin_P - self.gamma)
