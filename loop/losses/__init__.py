"""The parts that several algorithms share."""

from .algorithm import (
    Aggregation,
    Algorithm,
    Count,
    Loss,
    NonNegative,
    Positive,
    Share,
    Unit,
    aggregate,
)
from .critic import WithCritic
from .importance import Correction
from .kl import KL
from .policy_gradient import Clipped, Credit, NamedPart, PolicyGradient, Unclipped

__all__ = [
    "KL",
    "Aggregation",
    "Algorithm",
    "Clipped",
    "Correction",
    "Count",
    "Credit",
    "Loss",
    "NamedPart",
    "NonNegative",
    "PolicyGradient",
    "Positive",
    "Share",
    "Unclipped",
    "Unit",
    "WithCritic",
    "aggregate",
]
