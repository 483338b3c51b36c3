"""Pieces of texts, hashed: what embeddings and near-duplicates are made from."""

from collections.abc import Sequence

import numpy as np

_BASE = np.uint64(0x100000001B3)


def characters(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters of all texts, one behind the other, and where each text begins.

    Case and white space do not count; each text that is not blank begins and ends in a space.

    >>> [array.tolist() for array in characters(["A", " ", "b"])]
    [[32, 97, 32, 32, 98, 32], [0, 3, 3, 6]]
    """
    plain = [" ".join(text.casefold().split()) for text in texts]
    padded = [f" {text} " if text else "" for text in plain]
    joined = "".join(padded).encode("utf-32-le", "surrogatepass")
    return np.frombuffer(joined, np.uint32), np.cumsum([0, *map(len, padded)])


def rolled(codes: np.ndarray, n: int) -> np.ndarray:
    """Hash each piece of n characters, uint64 [characters - n + 1]."""
    wide, size = codes.astype(np.uint64), len(codes) - n + 1
    hashes = np.full(size, n, np.uint64)
    for i in range(n):
        hashes = hashes * _BASE + wide[i : i + size]
    return hashes


def mixed(hashes: np.ndarray) -> np.ndarray:
    """Spread the bits of uint64 (the finalizer of splitmix64)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
