"""Selectors that look at no try: walks through all tasks, and plain chance."""

from collections.abc import Callable

import numpy as np

from .selector import Chosen


class FixedOrder:
    """Every task once before any comes again, in an order that may change from epoch to epoch."""

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
