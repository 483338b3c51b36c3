"""MinHash: find texts that share most of their pieces without comparing all pairs.

A text is the set of its shingles, pieces of a few characters. A signature holds the least hashes of
the set; of two texts, the share of equal numbers estimates the Jaccard similarity of the sets
(Broder 1997). The set is hashed once into 32 bins, five times over, and an empty bin takes its next
neighbor's number (one permutation hashing with rotation, arXiv:1406.4784). Texts that agree in all
five numbers of one of 32 bands are compared exactly (Leskovec et al., Mining of Massive Datasets,
ch. 3): at a similarity of 0.7 that misses 1 pair in 350, at 0.8 none in 300,000.

The package `datasketch` finds the same duplicates in five times as long: it hashes text by text.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ..embed import characters, mixed, rolled
from .greedy import Alike

_BINS, _PASSES = 32, 5
_BANDS, _ROWS = 32, 5
_EMPTY = np.uint32(0xFFFFFFFF)
_CHARACTERS = 1 << 18
"""Characters that are hashed at once, so that the numbers stay in the processor's cache."""


class Shingles:
    """The sets of shingles of texts, and their signatures."""

    def __init__(self, texts: Sequence[str], *, length: int) -> None:
        parts = [_hashed(some, length) for some in _bounded(texts)]
        self._hashes = np.concatenate([hashes for hashes, _ in parts])
        sizes = np.concatenate([sizes for _, sizes in parts])
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        made = [_signatures(hashes, sizes) for hashes, sizes in parts]
        self.signatures = np.concatenate(made)
        """Uint32 [texts, 160]."""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def of(self, place: int) -> np.ndarray:
        """Return the hashes of a text's shingles, sorted, each once."""
        return self._hashes[self._starts[place] : self._starts[place + 1]]

    def jaccard(self, one: int, other: int) -> float:
        """Return the share of the shingles of either that both texts have."""
        a, b = self.of(one), self.of(other)
        both = len(np.intersect1d(a, b, assume_unique=True))
        return both / (len(a) + len(b) - both)


def first_alike(
    texts: Sequence[str], blocks: np.ndarray, *, threshold: float, length: int
) -> Alike:
    """Find for each text the first similar text before it, in its block, that is kept.

    Texts are similar if their Jaccard similarity is at least `threshold`. A text without a similar
    one before it is kept.
    """
    shingles = Shingles(texts, length=length)
    found, kept = Alike.none(len(texts)), defaultdict[int, list[int]](list)
    # one byte of each number is enough to rule out most of the random matches
    short = shingles.signatures.astype(np.uint8)
    for place, shared in enumerate(_shared(shingles, blocks)):
        met = np.array(sorted(set().union(*(kept[bucket] for bucket in shared))), np.int64)
        for other in _likely(met, place, short, threshold, len(shingles.of(place))):
            similarity = shingles.jaccard(place, int(other))
            if similarity >= threshold:
                found.set(place, int(other), similarity)
                break
        else:
            for bucket in shared:
                kept[bucket].append(place)
    return found


def _likely(
    met: np.ndarray, place: int, short: np.ndarray, threshold: float, size: int
) -> np.ndarray:
    """Leave out the texts whose estimated similarity is four standard errors too small."""
    if not len(met):
        return met
    estimate = (short[met] == short[place]).mean(axis=1)
    error = np.sqrt(threshold * (1 - threshold) / min(short.shape[1], size))
    return met[estimate >= threshold - 4 * error]


def _shared(shingles: Shingles, blocks: np.ndarray) -> Iterator[list[int]]:
    """Yield for each text the buckets that it shares with another, one a band at most."""
    n = len(shingles)
    bands = shingles.signatures.reshape(n, _BANDS, _ROWS).astype(np.uint64)
    keys = mixed(blocks.astype(np.uint64))[:, None] + np.arange(_BANDS, dtype=np.uint64)
    for row in range(_ROWS):
        keys = mixed(keys ^ bands[:, :, row])
    has_any = np.array([len(shingles.of(i)) > 0 for i in range(n)])
    order = np.argsort(keys, axis=None, kind="stable")
    ordered = keys.ravel()[order]
    is_new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    bucket = np.cumsum(is_new) - 1
    sizes = np.bincount(bucket)
    buckets = np.empty(n * _BANDS, np.int64)
    buckets[order] = np.where(sizes[bucket] > 1, bucket, -1)
    buckets = np.where(has_any[:, None], buckets.reshape(n, _BANDS), -1)
    for row in buckets:
        yield row[row >= 0].tolist()


def _bounded(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    start, size = 0, 0
    for i, text in enumerate(texts):
        if i > start and size + len(text) > _CHARACTERS:
            yield texts[start:i]
            start, size = i, 0
        size += len(text)
    yield texts[start:]


def _hashed(texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of each text's shingles, sorted and each once, and how many each has."""
    bare = (text.strip() for text in texts)
    codes, starts = characters([text and text.ljust(length, "\0") for text in bare])
    if len(codes) < length:
        return np.empty(0, np.uint32), np.zeros(len(texts), np.int64)
    rows = np.repeat(np.arange(len(texts), dtype=np.uint64), np.diff(starts))
    hashes = mixed(rolled(codes, length)) >> np.uint64(32)
    inside = rows[: len(hashes)] == rows[length - 1 :]
    both = np.sort(((rows[: len(hashes)] << np.uint64(32)) | hashes)[inside])
    both = both[np.concatenate([[True], both[1:] != both[:-1]])] if len(both) else both
    sizes = np.bincount((both >> np.uint64(32)).astype(np.int64), minlength=len(texts))
    return both.astype(np.uint32), sizes


def _signatures(hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    n = len(sizes)
    firsts = np.repeat(np.arange(n) * _BINS, sizes)
    made = np.empty((n, _PASSES, _BINS), np.uint32)
    for turn in range(_PASSES):
        spread = mixed(hashes + (np.uint64(turn + 1) << np.uint64(32)))
        bins = firsts + (spread & np.uint64(_BINS - 1)).astype(np.int64)
        least = np.full(n * _BINS, _EMPTY)
        np.minimum.at(least, bins, (spread >> np.uint64(32)).astype(np.uint32))
        made[:, turn] = _filled(least.reshape(n, _BINS))
    # a band takes one number of each pass: bins of one pass may be borrowed from each other
    return made.transpose(0, 2, 1).reshape(n, _PASSES * _BINS)


def _filled(least: np.ndarray) -> np.ndarray:
    """Give an empty bin the number of the next one that is not, changed by how far it is."""
    own = np.arange(_BINS)
    place = np.where(least == _EMPTY, 2 * _BINS, own)
    twice = np.concatenate([place, place + _BINS], axis=1)
    nearest = np.minimum.accumulate(twice[:, ::-1], axis=1)[:, ::-1][:, :_BINS]
    distance = (nearest - own).astype(np.uint32)
    return np.take_along_axis(least, nearest % _BINS, axis=1) + distance * np.uint32(0x9E3779B1)
