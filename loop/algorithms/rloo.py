"""REINFORCE leave-one-out (RLOO), arXiv:2402.14740.

REINFORCE with several rollouts of each task: the baseline of each is the mean reward of the others,
which is unbiased and needs no critic. An answer is one action: the log-probabilities of its tokens
are summed. Assumes that the trained policy sampled the rows; ratios are not clipped, which the
paper finds unnecessary on policy (others clip them as PPO does). Older rows need a `correction`.

An answer that is alone in its group, as when the rewards of all others are NULL, has advantage 0,
because there is nothing to compare it with. In verl and Trinity-RFT it has its whole reward.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass

from ..losses import Count, Credit, Unclipped


@dataclass(frozen=True, kw_only=True)
class RLOO(Unclipped):
    """Log-probabilities of answers times their reward above the mean of the others."""

    group_size: Count = 4
    credit: Credit = "leave_one_out"
    """Reward minus the mean of the group's other rewards."""
