"""Weights on the move: from trainer to explorers through the store, in memory, or by broadcast."""

from .broadcast import Sender, fetched
from .following import (
    Follower,
    Published,
    check_weights,
    load_into,
    newest,
    published,
    started_from,
)
from .publishing import Publisher, publisher
from .shelf import Shelf
from .state import copied, digest_of, put_state, state_of

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
