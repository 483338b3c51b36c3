"""GRPO over rollouts of several rows, one a step of an agent: arXiv:2402.03300, as in rLLM.

The outcome of a rollout is the reward of its last step, or the sum of its steps' rewards if each
row has its own (`rewards: own` or `discounted` of `step_wise`). It is compared with the outcomes of
the other rollouts of its group, each counted once, and all steps of a rollout share its advantage.
Assumes that the rows of one rollout have the same `rollout_index`, and that a step causes what
follows it.

Metrics: those of all clipped policy gradients.
"""

from dataclasses import dataclass

from ...operators import Operator, step_zscore
from ..losses import Clipped


@dataclass(frozen=True, kw_only=True)
class MultiStepGRPO(Clipped):
    """Clipped policy gradient with the outcome of the whole rollout as each step's advantage."""

    per_step: bool = False
    """Whether a rollout's credit is divided by its number of steps."""

    def advantage(self) -> Operator:
        """The outcome in standard deviations above the mean of the group's rollouts."""
        return step_zscore(per_step=self.per_step)
