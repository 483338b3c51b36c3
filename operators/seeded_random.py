"""Chance that can be repeated: numbers that follow from a seed and the ids they are drawn for."""

import hashlib

_BITS = 53


def chance(seed: int, *ids: str | int) -> float:
    """Return a number of [0, 1) that is as good as random, and the same for the same arguments.

    >>> chance(0, "a") == chance(0, "a"), chance(0, "a") == chance(1, "a")
    (True, False)
    """
    text = "\x1f".join(map(str, (seed, *ids)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - _BITS)) / 2.0**_BITS
