"""REINFORCE, Williams 1992 (doi:10.1007/BF00992696).

The gradient of the expected reward is the mean of the reward, minus a baseline, times the gradient
of the log-probability of the whole answer. Assumes that the trained policy sampled the rows: the
loss has neither ratio nor clip, so older rows need a `correction`, and a step takes one update.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...operators import Operator
from ...operators import reinforce as reward_less_baseline
from ..losses import Count, Unclipped, Unit


@dataclass(frozen=True, kw_only=True)
class Reinforce(Unclipped):
    """Log-probabilities of tokens times the reward minus a baseline."""

    unit: ClassVar[Unit] = "row"

    group_size: Count = 1
    baseline: float | Literal["batch_mean"] = "batch_mean"
    """A constant, or the mean of the step's rewards."""

    def advantage(self) -> Operator:
        """Reward minus the baseline."""
        return reward_less_baseline(baseline=self.baseline)
