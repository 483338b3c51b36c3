"""What a selector is, and the two ways of taking n of many without putting one back."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Chosen:
    """The tasks of a batch, by their places in the selector's list."""

    places: np.ndarray
    scores: np.ndarray | None = None
    """What each was chosen by."""
    expected: np.ndarray | None = None
    """The pass rate that each is expected to have."""


class Selector(Protocol):
    """Chooses tasks; the same arguments after the same tries give the same tasks."""

    def choose(self, n: int, *, first: int, rng: np.random.Generator) -> Chosen:
        """Choose n tasks, when `first` were chosen by batches before."""
        ...


def weighted(weights: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw n places without replacement, each next one with a chance in proportion to its weight.

    What has no weight comes only when nothing else is left. (Gumbel top-k: arXiv:1903.06059.)
    """
    noise = rng.gumbel(size=len(weights))
    known = weights > 0
    keys = noise + np.log(weights, where=known, out=np.zeros(len(weights)))
    return np.lexsort((-keys, ~known))[:n]


def softmaxed(
    scores: np.ndarray, n: int, temperature: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw n places without replacement by the softmax of scores; at temperature 0 the n best."""
    keys = scores / temperature + rng.gumbel(size=len(scores)) if temperature else scores
    return np.argsort(-keys, kind="stable")[:n]
