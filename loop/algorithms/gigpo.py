"""Group-in-Group Policy Optimization (GiGPO), arXiv:2505.10978, for agents of several steps.

Beside the try's outcome within its group, each step is compared with the steps of the group's other
tries that stood at the same state (an anchor): which action there led to more. Anchors are those of
one group, so of one task. Assumes that states come again, and that rows of one try have the same
`rollout`.

Metrics: those of all clipped policy gradients.
"""

from dataclasses import dataclass
from typing import Literal

from ...operators import Operator
from ...operators import gigpo as credit
from ..losses import Clipped, NonNegative, Share


@dataclass(frozen=True, kw_only=True)
class GiGPO(Clipped):
    """Clipped policy gradient with the credit of the try and that of the step at its state."""

    omega: NonNegative = 1.0
    """Weight of the step's credit beside the try's."""
    gamma: Share = 0.95
    """Discount a step."""
    normalise: Literal["none", "std"] = "none"
    """Whether credits are divided by their standard deviation."""
    state: str = "prompt_text"
    """The column that says what the agent saw."""
    step_reward: str | None = None
    """The column of each step's own reward; None: `reward`, read as the rows say. Where `metrics`
    have `reward_discount` (of `step_wise` with `rewards: own` or `discounted`), steps have rewards
    of their own; elsewhere the last one's is the rollout's."""

    def advantage(self) -> Operator:
        """The try's credit within its group plus the step's among those at the same state."""
        return credit(
            state=self.state,
            step_reward=self.step_reward,
            omega=self.omega,
            gamma=self.gamma,
            normalise=self.normalise,
        )
