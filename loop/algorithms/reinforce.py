"""REINFORCE, Williams 1992 (doi:10.1007/BF00992696).

The gradient of the expected reward is the mean of the reward, less a baseline, times the gradient
of the log-probability of the whole answer. Assumes that the policy that is trained wrote the rows:
there is no ratio and no clip, so older rows need a `correction`, and one update a step.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ...operators import Operator
from ...operators import reinforce as reward_less_baseline
from ..losses import Aggregation, Count, PolicyGradient, Unit
from ..losses.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyGradient):
    """Log-probabilities of tokens times the reward less a baseline."""

    unit: ClassVar[Unit] = "row"

    group_size: Count = 1
    """Tries at each task."""
    baseline: float | Literal["batch_mean"] = "batch_mean"
    """A constant, or the mean of the step's rewards."""
    aggregation: Aggregation = "seq-mean-token-sum"
    """How losses of tokens become one number."""

    def advantage(self) -> Operator:
        """Reward less the baseline."""
        return reward_less_baseline(baseline=self.baseline)

    def surrogate(
        self, batch: Batch, logprobs_BT: Tensor, old_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probability times advantage, negated."""
        del old_BT  # no ratio: on policy
        return -batch.advantage_BT * logprobs_BT, {}
