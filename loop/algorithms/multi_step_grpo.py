"""GRPO over tries of several rows, one a step of an agent: arXiv:2402.03300, as in rLLM.

The outcome of a try is the reward of its last step, or the sum of its steps' rewards where each row
has its own (`rewards: own` or `discounted` of `step_wise`). It is compared with the outcomes of the
other tries of its group, each try counting once, and all steps of a try share its credit. Assumes
that rows of one try have the same `rollout`, and that what follows a step was caused by it.

Metrics: those of all clipped policy gradients.
"""

from dataclasses import dataclass

from ...operators import Operator, step_zscore
from ..losses import Clipped


@dataclass(frozen=True, kw_only=True)
class MultiStepGRPO(Clipped):
    """Clipped policy gradient with the outcome of the whole try as each step's advantage."""

    per_step: bool = False
    """Whether a try's credit is divided by its number of steps."""

    def advantage(self) -> Operator:
        """The outcome in standard deviations above the mean of the group's tries."""
        return step_zscore(per_step=self.per_step)
