"""Paired tests of two policies on the same tasks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...store.errors import JobError
from .estimates import CELLS, PASSED, bootstrap

EXACT_UP_TO = 14
"""Up to this many tasks with a difference, the permutation test enumerates all swaps."""
SWAPS = 10_000
"""Random swaps, where there are more."""


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """How much better B is than A, over the tasks on which both have scores."""

    num_tasks: int
    num_left_out: int
    """Tasks on which only one of the two has scores."""
    difference: float
    """Mean reward of B minus that of A."""
    low: float | None
    """Bounds of the 95 % interval, from tasks resampled with replacement."""
    high: float | None
    p_value: float
    """Two-sided p of a paired permutation test, which swaps A and B task by task."""
    accuracy_difference: float
    """Share of correct rollouts of B minus that of A."""
    only_a: int | None
    """Tasks that only A solved; None where a task has several rollouts."""
    only_b: int | None
    mcnemar_p: float | None
    """Two-sided p of McNemar's exact test on these two numbers."""


def paired(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], *, seed: int = 0
) -> PairedTest:
    """Compare the rewards of two policies by task; JobError when they share no scored task.

    >>> found = paired({"t": [0.0], "u": [0.0]}, {"t": [1.0], "u": [1.0]})
    >>> found.difference, found.p_value, found.only_b
    (1.0, 0.5, 2)
    """
    # Sorted, so that the same seed swaps the same tasks.
    both = sorted(t for t in a if t in b and len(a[t]) and len(b[t]))
    if not both:
        raise JobError(
            "the two policies have no scored task in common; evaluate both on the same tasks"
        )
    differences = np.array([np.mean(b[t]) - np.mean(a[t]) for t in both])
    right = np.array([[_right(one[t]) for t in both] for one in (a, b)])
    # of several rollouts some may be correct, and McNemar's test counts tasks as solved or not
    once = all(len(one[t]) == 1 for one in (a, b) for t in both)
    only_a = int(((right[0] == 1) & (right[1] == 0)).sum()) if once else None
    only_b = int(((right[0] == 0) & (right[1] == 1)).sum()) if once else None
    low, high = bootstrap(differences, seed=seed) if len(both) > 1 else (None, None)
    return PairedTest(
        num_tasks=len(both),
        num_left_out=len(set(a) | set(b)) - len(both),
        difference=float(differences.mean()),
        low=low,
        high=high,
        p_value=permutation(differences, seed=seed),
        accuracy_difference=float((right[1] - right[0]).mean()),
        only_a=only_a,
        only_b=only_b,
        mcnemar_p=None if only_a is None or only_b is None else mcnemar(only_a, only_b),
    )


def permutation(differences: Sequence[float] | np.ndarray, *, seed: int = 0) -> float:
    """Return how often the mean is as far from 0 when each difference has a random sign.

    Exact for up to 14 nonzero differences; beyond that, 10,000 random swaps and the observed one.

    >>> permutation([1.0, 1.0, 1.0, 0.0])
    0.25
    """
    values = np.asarray(differences, np.float64)
    values = values[values != 0]
    # With a tolerance: sums in another order round differently.
    seen = abs(values.sum()) - 1e-12 * np.abs(values).sum()
    if len(values) <= EXACT_UP_TO:
        swaps = np.arange(1 << len(values))
        signs = 1 - 2 * ((swaps[:, None] >> np.arange(len(values))) & 1)
        return float((np.abs(signs @ values) >= seen).mean())
    rng, as_far = np.random.default_rng(seed), 1
    batch = max(1, CELLS // len(values))
    for first in range(0, SWAPS, batch):
        size = min(batch, SWAPS - first), len(values)
        signs = rng.choice(np.array([-1.0, 1.0]), size=size)
        as_far += int((np.abs(signs @ values) >= seen).sum())
    return as_far / (SWAPS + 1)


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the two-sided p of McNemar's exact test: a fair coin per task that only one solved.

    >>> mcnemar(1, 5)
    0.21875
    """
    n, few = only_a + only_b, min(only_a, only_b)
    below = sum(math.comb(n, i) for i in range(few + 1))
    return min(1.0, 2 * below / (1 << n))


def _right(rewards: Sequence[float]) -> float:
    return float((np.asarray(rewards) >= PASSED).mean())
