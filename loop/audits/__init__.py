"""Questions that a run's stored history answers: each is a function of a store and a run."""

from .bias import Bias, bias
from .drop import Drop, drop
from .oddities import Oddities, oddities
from .off_policy import OffPolicy, off_policy
from .value import DataValue, value

__all__ = [
    "Bias",
    "DataValue",
    "Drop",
    "Oddities",
    "OffPolicy",
    "bias",
    "drop",
    "oddities",
    "off_policy",
    "value",
]
