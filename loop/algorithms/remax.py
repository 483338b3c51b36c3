"""ReMax, arXiv:2310.10505: REINFORCE whose baseline is the reward of the greedy answer.

Each task has one additional, greedy rollout, which is stored but not trained on. The advantage of
an answer is its reward minus that of the greedy answer, which lowers the variance without a critic
or many rollouts. Assumes that rewards of one task are comparable.

Metrics: those of all policy gradients.
"""

from dataclasses import dataclass

from ..losses import Count, Credit, Unclipped


@dataclass(frozen=True, kw_only=True)
class ReMax(Unclipped):
    """Policy gradient with the reward above that of the greedy answer."""

    group_size: Count = 1
    """Rollouts of each task, in addition to the greedy one."""
    credit: Credit = "above_greedy"
    """Reward above that of the greedy answer."""
