"""Proximal Policy Optimization (PPO), arXiv:1707.06347, with advantages of arXiv:1506.02438.

A critic predicts the future reward at each token; the advantage of a token is what came after it
beyond that prediction, over the trained tokens of its sequence only; the policy takes a clipped
policy-gradient step, and the critic learns the returns. The critic is a separate network, so its
loss does not affect the policy. Assumes that one rollout of a task is enough, since the critic
provides the baseline, and that the behavior policy's log-probs were stored as sampled. If all rows
of a step have `token_rewards`, these count; else the reward counts at the last token.

Unlike in verl and Trinity-RFT, whitening divides by the standard deviation with n (the
population's) plus 1e-8, and not by the root of the variance with n - 1 plus 1e-8. Advantages here
are sqrt(n / (n - 1)) of those, for 1,000 trained tokens 1.0005 times as large. Advantages skip
tokens of tools and padding, which those include.

Metrics: those of all clipped policy gradients, and of a critic.
"""

from dataclasses import dataclass

from ..losses import Clipped, WithCritic


@dataclass(frozen=True, kw_only=True)
class PPO(WithCritic, Clipped):
    """Clipped policy gradient with a critic."""
