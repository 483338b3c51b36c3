"""Engines sample tokens; `start` makes the one that a configuration names."""

from ..models.weights import Weights
from .engine import Engine, Request, Sampled

__all__ = ["Engine", "Request", "Sampled", "Weights"]
