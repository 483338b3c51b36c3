"""ReMax, arXiv:2310.10505: REINFORCE whose baseline is the reward of the greedy answer.

Each task is tried once more, greedily; that try is stored, and not trained on. What an answer is
credited with is its reward less the greedy one's, which lowers the variance with neither a critic
nor many tries. Assumes that rewards of one task are comparable.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...operators import Operator, above_greedy
from ..losses import Aggregation, Count, PolicyGradient
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ReMax(PolicyGradient):
    """Policy gradient with the reward above that of the greedy answer."""

    greedy_tries: ClassVar[int] = 1

    group_size: Count = 1
    """Tries at each task, beside the greedy one."""
    aggregation: Aggregation = "seq-mean-token-sum"
    """How losses of tokens become one number."""

    def advantage(self) -> Operator:
        """Reward above that of the greedy answer."""
        return above_greedy()

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-likelihood by advantage, negated: no ratio, since rows are on policy."""
        del old_BT
        return -logprobs_BT * batch.advantage_BT, {}
