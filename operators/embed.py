"""Texts as vectors: equal texts have equal vectors, alike ones a cosine near 1."""

from collections.abc import Sequence

import numpy as np

from .ngrams import characters, mixed, rolled

NGRAMS = (2, 3, 4)
"""Lengths of the pieces of text that are counted."""

VERSION = "1"
"""Of all embedders here; raised when one gives other vectors than before."""


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
    # sums of whole numbers, so that their order does not matter
    totals = np.abs(counters).sum(axis=1, keepdims=True)
    shares = np.abs(counters) / np.maximum(totals, 1)
    return (np.sign(counters) * np.sqrt(shares)).astype(np.float32)
