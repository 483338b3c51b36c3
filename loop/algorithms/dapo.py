"""Decoupled clip and dynamic sampling policy optimization (DAPO), arXiv:2503.14476.

GRPO with a range of ratios that is wider above, so that unlikely tokens can become likely, and with
losses averaged over all tokens, so that long answers count by their length. The rest of the paper
is said beside the algorithm: `explorer.operators: [dapo_dynamic_sampling]` leaves out groups that
are all right or all wrong, and the reward `overlong` punishes answers that come near the most
tokens. Assumes what GRPO does; by default there is no penalty to a reference policy.

Metrics: those of GRPO.
"""

from dataclasses import dataclass

from ..losses import Aggregation, Count, Positive
from .grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """Policy gradient clipped wider above, each token counting the same."""

    group_size: Count = 16
    """Tries at each task."""
    clip_high: Positive | None = 0.28
    """How far above 1 the ratio may push; None: as far as below."""
    aggregation: Aggregation = "token-mean"
    """How losses of tokens become one number."""
