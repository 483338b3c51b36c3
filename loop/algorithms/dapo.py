"""Decoupled clip and dynamic sampling policy optimization (DAPO), arXiv:2503.14476.

GRPO with a higher upper clip, so that unlikely tokens can become likely, and with losses averaged
over all tokens, so that long answers count by their length. The rest of the paper is configured
elsewhere: `explorer.operators: [dapo_dynamic_sampling]` leaves out groups whose answers are all
right or all wrong, and the reward `overlong` penalizes answers near the token limit. Assumes what
GRPO does; by default the KL penalty is off.

Metrics: those of GRPO.
"""

from dataclasses import dataclass

from ..losses import Aggregation, Count, Positive
from .grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """Policy gradient clipped wider above, each token counting the same."""

    group_size: Count = 16
    clip_high: Positive | None = 0.28
    aggregation: Aggregation = "token-mean"
