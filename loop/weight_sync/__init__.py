"""Weights from the trainer to the engines: through the store, in memory, or by broadcast."""

from ..models.weights import PublishedWeights
from .broadcast import Sender, WeightsLostError, fetch
from .memory import WeightCache
from .publisher import Publisher, publisher
from .subscriber import WeightSubscriber, newest, published, started_from

__all__ = [
    "PublishedWeights",
    "Publisher",
    "Sender",
    "WeightCache",
    "WeightSubscriber",
    "WeightsLostError",
    "fetch",
    "newest",
    "published",
    "publisher",
    "started_from",
]
