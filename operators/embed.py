"""Texts as vectors: similar texts have a cosine near 1."""

from collections.abc import Sequence

import numpy as np

__all__ = ["hashed_ngrams"]  # the built-in embedders; other functions here are their parts

NGRAMS = (2, 3, 4)
"""Lengths of the pieces of text that are counted."""

VERSION = "1"
"""Version of all embedders here; increased when one returns other vectors."""

_BASE = np.uint64(0x100000001B3)


def hashed_ngrams(texts: Sequence[str], *, dims: int = 256) -> np.ndarray:
    """Count the pieces of 2 to 4 characters of each text, hashed to `dims` signed counters.

    Float32 [texts, dims]: the signed square roots of the counters, scaled to length 1; zeros for a
    blank text. Case and white space do not count. No model, and the same on any machine.
    (Feature hashing: Weinberger et al. 2009, arXiv:0902.2206.)

    >>> a, b, c = hashed_ngrams(["carry the one", "Carry  the one!", "no idea"])
    >>> float(a @ b) > 0.8 > 0.3 > float(a @ c)
    True
    """
    codes, starts = characters(texts)
    counts = np.zeros(len(texts) * dims)
    rows = np.repeat(np.arange(len(texts)), np.diff(starts))
    for n in NGRAMS:
        if len(codes) < n:
            continue
        hashes = mixed(rolled(codes, n))
        inside = rows[: len(hashes)] == rows[n - 1 :]
        places = rows[: len(hashes)] * dims + (hashes % np.uint64(dims)).astype(np.int64)
        signs = np.where(hashes >> np.uint64(63), 1.0, -1.0)
        counts += np.bincount(places[inside], signs[inside], minlength=len(counts))
    counters = counts.reshape(len(texts), dims)
    # sums of whole numbers are exact, so the vectors are the same on any machine
    totals = np.abs(counters).sum(axis=1, keepdims=True)
    shares = np.abs(counters) / np.maximum(totals, 1)
    return (np.sign(counters) * np.sqrt(shares)).astype(np.float32)


def characters(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters of all texts, one after the other, and where each text begins.

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
