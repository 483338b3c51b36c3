"""Engines sample tokens; `start` makes the one that a configuration names."""

from .engine import Engine, Request, Sampled, Weights

__all__ = ["Engine", "Request", "Sampled", "Weights"]
