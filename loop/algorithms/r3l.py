"""R3L's objective (arXiv:2601.03715): a policy gradient in which successes count more.

Where most rollouts of a task fail, failures dominate the gradient, and rows from a retry under
guidance are off policy. So the advantage is the reward less its group's mean, times `alpha` where
it is positive ("positive amplification"), and the loss has neither ratio nor penalty. The rest of
R3L are rows: `retry_from_step` and `reflect_and_retry` sample guided retries, and their shared
beginnings are not trained on again ("pivotal credit"). Assumes that good rows are worth imitating
whichever policy sampled them.

The authors' code also gives each reward of 1 or more the advantage 1, whatever its group: that is
`solved: 1.0`. Its losses of tokens are divided by 2, the 1 + tau of OPMD, which here the learning
rate does.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass

from ...operators import Operator, group_amplified
from ..losses import Aggregation, Positive, Unclipped


@dataclass(frozen=True, kw_only=True)
class R3L(Unclipped):
    """Log-probabilities of tokens times the amplified reward above the group's mean."""

    aggregation: Aggregation = "token-mean"
    alpha: Positive = 3.0
    """Factor of positive advantages."""
    solved: float | None = None
    """Reward from which the advantage is 1; None: none."""

    def advantage(self) -> Operator:
        """Reward less its group's mean, times `alpha` where that is positive."""
        return group_amplified(alpha=self.alpha, solved=self.solved)
