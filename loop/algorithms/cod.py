"""GRPO over rollouts of several episodes: arXiv:2402.03300, as in CoD of Trinity-RFT.

A rollout is a sequence of rows, such as tasks and the hints between them, each with its own reward.
A row is credited with the rewards from it on alone, since it cannot have caused earlier ones: their
mean, the mean of the next `window`, or with `gamma` their discounted sum; less the mean of the same
over the rows of the group at the same place. `temperature` multiplies an advantage by
exp(advantage / temperature), so that good ones count more. Assumes that the rows of one rollout
have the same `rollout_index`, and rewards of their own (`rewards: own` of `step_wise`). No paper of
this credit is known to us: the formulas are those of that code, whose adaptive temperature is not
there.

Metrics: those of all clipped policy gradients.
"""

from dataclasses import dataclass

from ...operators import Operator, causal_returns
from ..losses import Clipped, Count, Positive, Share


@dataclass(frozen=True, kw_only=True)
class CoD(Clipped):
    """Clipped policy gradient with the rewards that follow each row, compared at its place."""

    window: Count | None = None
    """How many rewards count, the row's own first; None: all that follow."""
    gamma: Share | None = None
    """Discount per row of a sum; None: the mean."""
    temperature: Positive | None = None
    """Advantage at which the weight is e; None: all weigh the same."""

    def advantage(self) -> Operator:
        """The mean or sum of the rewards that follow, less its mean over the group."""
        return causal_returns(window=self.window, gamma=self.gamma, temperature=self.temperature)
