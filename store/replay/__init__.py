"""Draws: which rows a training step gets, and with what weights. Freshness is enforced here."""

from .draw import Draw, Freshness, Order, Supply
from .mixture import Mixture, Source, most, split
from .sampler import Sampler
from .strategies import STRATEGIES, Fifo, Prioritized, Strategy, Uniform

__all__ = [
    "STRATEGIES",
    "Draw",
    "Fifo",
    "Freshness",
    "Mixture",
    "Order",
    "Prioritized",
    "Sampler",
    "Source",
    "Strategy",
    "Supply",
    "Uniform",
    "most",
    "split",
]
