"""Harmonized on- and off-policy learning from an expert (CHORD), arXiv:2508.11408.

MIX with two controls over how much an expert steers. The weight mu of the expert's rows follows a
schedule over training steps, from imitation to exploration (CHORD-mu: a high `mu`, a low
`mu_valley`, some `mu_decay_steps`). And each of the expert's tokens is weighted by phi = p (1 - p)
of the policy's probability of it, without gradient, so that tokens count little that are already
likely or that would change the policy abruptly (CHORD-phi, the default, with a fixed mu). Assumes
what MIX does.

Metrics: those of MIX; `train/nll` is not weighted by phi.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from ..losses import Share
from .mix import Mix


@dataclass(frozen=True, kw_only=True)
class CHORD(Mix):
    """Clipped policy gradient on own rows and weighted cross-entropy on an expert's."""

    mu: Share = 0.1
    """Peak weight of the expert's rows."""
    mu_valley: Share | None = None
    """Weight after the decay; None: the peak."""
    mu_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Training steps over which the weight rises linearly from 0."""
    mu_decay_steps: Annotated[int, Field(ge=0)] = 0
    """Training steps after the warm-up over which it falls to `mu_valley`, as half a cosine."""
    phi: bool = True
    """Whether the expert's tokens are weighted by p (1 - p)."""

    def mu_of(self, step: int) -> float:
        """Return the weight of the expert's rows in a training step, counted from 1."""
        since = step - self.mu_warmup_steps
        if since < 0:
            return step / self.mu_warmup_steps * self.mu
        valley = self.mu if self.mu_valley is None else self.mu_valley
        if since >= self.mu_decay_steps:
            return valley
        height = 0.5 * (1 + math.cos(math.pi * since / self.mu_decay_steps))
        return valley + (self.mu - valley) * height

    def imitation(self, logprobs_BT: Tensor) -> Tensor:
        """Return the loss of each of the expert's tokens: [B, T]."""
        if not self.phi:
            return -logprobs_BT
        p_BT = logprobs_BT.detach().exp()
        return -p_BT * (1 - p_BT) * logprobs_BT
