"""REINFORCE leave-one-out (RLOO), arXiv:2402.14740.

REINFORCE with several tries at each task: the baseline of each is the mean reward of the others,
which is unbiased and needs no critic. An answer is one action: the log-probabilities of its tokens
are summed. Assumes that the policy that is trained wrote the rows; there is no clip, which the
paper finds needless on policy (others clip ratios as PPO does). Older rows need a `correction`.

An answer that is alone in its group, as when the rewards of all others are NULL, has advantage 0:
there is nothing to compare it with. In verl and Trinity-RFT it has its whole reward.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass

from torch import Tensor

from ...operators import Operator, leave_one_out
from ..losses import Aggregation, Count, PolicyGradient
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class RLOO(PolicyGradient):
    """Log-probabilities of answers times how much better they are than the others."""

    group_size: Count = 4
    """Tries at each task."""
    aggregation: Aggregation = "seq-mean-token-sum"
    """How losses of tokens become one number."""

    def advantage(self) -> Operator:
        """Reward less the mean of the group's other rewards."""
        return leave_one_out()

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probability times advantage, negated."""
        del old_BT  # no ratio: on policy
        return -batch.advantage_BT * logprobs_BT, {}
