"""Selectors: the protocol, fixed and random orders, and posteriors of pass rates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Chosen:
    """The tasks of a batch, by their indices in the selector's list."""

    places: np.ndarray
    scores: np.ndarray | None = None
    """The score by which each was selected."""
    expected: np.ndarray | None = None
    """The expected pass rate of each."""


class Selector(Protocol):
    """Selects tasks; the same arguments after the same rollouts return the same tasks."""

    def choose(self, n: int, *, first: int, rng: np.random.Generator) -> Chosen:
        """Choose n tasks, when `first` were chosen by batches before."""
        ...


def weighted(weights: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw n indices without replacement, each with probability proportional to its weight.

    Weight 0 is drawn only when nothing else is left (Gumbel top-k, arXiv:1903.06059).
    """
    noise = rng.gumbel(size=len(weights))
    known = weights > 0
    # `where`: log(0) would warn, and warnings are errors in the tests
    keys = noise + np.log(weights, where=known, out=np.zeros(len(weights)))
    return np.lexsort((-keys, ~known))[:n]


def softmaxed(
    scores: np.ndarray, n: int, temperature: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw n indices without replacement by the softmax of scores; at temperature 0, the n best."""
    keys = scores / temperature + rng.gumbel(size=len(scores)) if temperature else scores
    return np.argsort(-keys, kind="stable")[:n]


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of a batch, for its tasks with a rollout that has a reward."""

    places: np.ndarray
    passes: np.ndarray
    rollouts: np.ndarray

    @property
    def rates(self) -> np.ndarray:
        """The share of rollouts that passed."""
        return self.passes / self.rollouts


@dataclass
class PassRatePosterior:
    """The parameters of each task's Beta distribution, and those of BOTS's inference."""

    alpha: np.ndarray
    """Successes counted."""
    beta: np.ndarray
    """Failures counted."""
    capability: float | None = None
    """How far the policy is from the weak reference (0) to the strong one (1)."""
    rho: float | None = None
    """Weight of inferred pass rates."""

    @property
    def mean(self) -> np.ndarray:
        """The expected pass rates."""
        return self.alpha / (self.alpha + self.beta)

    def count(self, seen: Outcomes) -> None:
        """Add the outcomes of a batch, or of earlier runs."""
        self.alpha[seen.places] += seen.passes
        self.beta[seen.places] += seen.rollouts - seen.passes


class FixedOrder:
    """Every task once per epoch, in an order that may differ between epochs."""

    def __init__(
        self, order: Callable[[int], np.ndarray], *, scores: np.ndarray | None = None
    ) -> None:
        """Walk in `order(epoch)`, epochs counted from 0."""
        self._order, self._scores = order, scores
        self._epoch, self._places = 0, order(0)

    def choose(self, n: int, *, first: int, rng: np.random.Generator) -> Chosen:
        """Choose the next n."""
        places = np.array([self._at(i) for i in range(first, first + n)], np.int64)
        return Chosen(places, None if self._scores is None else self._scores[places])

    def _at(self, i: int) -> int:
        epoch, place = divmod(i, len(self._places))
        if epoch != self._epoch:
            self._epoch, self._places = epoch, self._order(epoch)
        return self._places[place]


def sequential(size: int) -> FixedOrder:
    """Walk in the order that there is."""
    return FixedOrder(lambda _: np.arange(size))


def shuffle(size: int, seed: tuple[int, ...]) -> FixedOrder:
    """Walk in another random order each epoch."""
    return FixedOrder(
        lambda epoch: np.random.default_rng([seed[0], epoch, *seed[1:]]).permutation(size)
    )


def ordered(values: np.ndarray, *, falling: bool) -> FixedOrder:
    """Walk from small to large values, or from large to small; NaN comes last."""
    order = np.argsort(-values if falling else values, kind="stable")
    return FixedOrder(lambda _: order, scores=values)


class UniformRandom:
    """Each task as likely as any other."""

    def __init__(self, size: int, *, replacement: bool) -> None:
        self._size, self.replacement = size, replacement

    def choose(self, n: int, *, first: int, rng: np.random.Generator) -> Chosen:
        """Choose n."""
        return Chosen(rng.choice(self._size, n, replace=self.replacement))
