"""Advantage actor-critic (A2C), the synchronous form of A3C, arXiv:1602.01783.

A critic predicts the future reward at each token; each token's log-probability is raised by how far
the rewards from it on lie above that prediction, and the critic learns the returns. There is no
ratio and no clip: assumes that the trained policy sampled the rows, so older rows need a
`correction`, and a step takes one update. Rewards are those of PPO; with `lam` below 1 the
advantage is that of arXiv:1506.02438. The paper's entropy bonus is `entropy_coef`.

Metrics: those of all policy gradients, and of a critic.
"""

from dataclasses import dataclass

from ..losses import Positive, Share, Unclipped, WithCritic


@dataclass(frozen=True, kw_only=True)
class A2C(WithCritic, Unclipped):
    """Log-probabilities of tokens times their advantage over a critic."""

    lam: Share = 1.0
    """Weight of returns over values: 1 uses returns, as in the paper; 0 the next token's value."""
    whiten: bool = False
    """Whether advantages are scaled to mean 0 and deviation 1 over the step's trained tokens."""
    clip_value: Positive | None = None
    """Largest change of a value from before the step; None: no limit."""
