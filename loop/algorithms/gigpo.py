"""Group-in-Group Policy Optimization (GiGPO), arXiv:2505.10978, for agents of several steps.

Each rollout's outcome is compared within its group; in addition, each step is compared with the
steps of the group's other rollouts at the same state (an anchor): which action led to more. Anchors
belong to one group, so to one task. Assumes that states recur, and that the rows of one rollout
have the same `rollout_index`.

Metrics: those of all clipped policy gradients.
"""

from dataclasses import dataclass
from typing import Literal

from ...operators import Operator
from ...operators import gigpo as credit
from ..losses import Clipped, NonNegative, Share


@dataclass(frozen=True, kw_only=True)
class GiGPO(Clipped):
    """Clipped policy gradient with the credit of the rollout and of the step at its state."""

    omega: NonNegative = 1.0
    """Weight of the step's credit relative to the rollout's."""
    gamma: Share = 0.95
    """Discount per step."""
    normalize: Literal["none", "std"] = "none"
    """Whether credits are divided by their standard deviation."""
    state: str = "prompt_text"
    """The column that identifies the state of a step."""
    step_reward: str | None = None
    """The column of each step's own reward; None: `reward`. If `metrics` have `reward_discount` (of
    `step_wise` with `rewards: own` or `discounted`), each step's `reward` is its own; otherwise the
    last step's is the rollout's."""

    def advantage(self) -> Operator:
        """The rollout's credit within its group plus the step's among steps at the same state."""
        return credit(
            state=self.state,
            step_reward=self.step_reward,
            omega=self.omega,
            gamma=self.gamma,
            normalize=self.normalize,
        )
