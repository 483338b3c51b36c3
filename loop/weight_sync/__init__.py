"""Weights on the move: from trainer to explorers through the store, in memory, or by broadcast."""

from ..models.state_dict import copied, digest_of, put_state, state_of
from ..models.weights import PublishedWeights, check_weights, load_into
from .broadcast import Sender, fetch
from .memory import WeightCache
from .publisher import Publisher, publisher
from .subscriber import WeightSubscriber, newest, published, started_from

__all__ = [
    "PublishedWeights",
    "Publisher",
    "Sender",
    "WeightCache",
    "WeightSubscriber",
    "check_weights",
    "copied",
    "digest_of",
    "fetch",
    "load_into",
    "newest",
    "published",
    "publisher",
    "put_state",
    "started_from",
    "state_of",
]
