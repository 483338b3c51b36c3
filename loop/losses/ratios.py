"""Ratios of probabilities that never overflow, made of their logarithms."""

from torch import Tensor

FURTHEST = 20.0
"""Log-ratios are cut off at so many nats, on both sides."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return log-ratios, none further from 0 than 20 nats; what is cut off has no gradient.

    An infinite ratio would make a gradient of nan also where a clip has stopped it: 0 * inf.
    """
    return log_ratio.clamp(-FURTHEST, FURTHEST)
