"""Engines sample tokens; policies answer conversations with them."""

from ..models.weights import Weights
from .engine import Engine, Request, Sampled

__all__ = ["Engine", "Request", "Sampled", "Weights"]
