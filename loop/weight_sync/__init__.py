"""Weights on the move: from trainer to explorers through the store, in memory, or by broadcast."""

from ..models.state_dict import copied, digest_of, put_state, state_of
from ..models.weights import Published, check_weights, load_into
from .broadcast import Sender, fetched
from .memory import Shelf
from .publisher import Publisher, publisher
from .subscriber import Follower, newest, published, started_from

__all__ = [
    "Follower",
    "Published",
    "Publisher",
    "Sender",
    "Shelf",
    "check_weights",
    "copied",
    "digest_of",
    "fetched",
    "load_into",
    "newest",
    "published",
    "publisher",
    "put_state",
    "started_from",
    "state_of",
]
