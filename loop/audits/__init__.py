"""Questions that a run's stored history answers: each is a function of a store and a run."""

from .bias import Bias, bias
from .drop import Drop, drop

__all__ = ["Bias", "Drop", "bias", "drop"]
