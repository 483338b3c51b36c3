"""What tries at tasks say of a policy: means, pass@k and best@k, each with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

PASSED = 1.0
"""A try with so much reward, or more, was right."""
CONFIDENCE = 0.95
RESAMPLES = 2000
_Z = 1.959963984540054
"""The standard normal's quantile at (1 + CONFIDENCE) / 2."""
CELLS = 1 << 22
"""Numbers that are resampled at once."""

Scores = Sequence[Sequence[float]]
"""For each task the rewards of its tries; those that could not be computed are left out."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number that tries say, and between which bounds it lies with 95 % confidence."""

    name: str
    """accuracy, reward_mean, pass@K, best@K."""
    value: float
    low: float | None
    """None: too few tasks to say."""
    high: float | None
    num_tasks: int
    """With as many tries as it needs."""
    interval: Literal["wilson", "bootstrap"]
    """Wilson's for shares of tries at different tasks; else tasks are drawn again and again."""


def estimates(scores: Scores, *, ks: Sequence[int] = (), seed: int = 0) -> list[Estimate]:
    """Return the share of right tries, the mean reward, and for each k pass@k and best@k.

    >>> [(e.name, e.value) for e in estimates([[1.0, 0.0], [0.0, 0.5]], ks=[2])]
    [('accuracy', 0.25), ('reward_mean', 0.375), ('pass@2', 0.5), ('best@2', 0.75)]
    """
    tried = [np.asarray(one, np.float64) for one in scores if len(one)]
    made = [
        _estimate("accuracy", [_share(one) for one in tried], tried, seed),
        _estimate("reward_mean", [one.mean() for one in tried], None, seed),
    ]
    for k in ks:
        enough = [one for one in tried if len(one) >= k]
        of_k = [pass_at_k(len(one), int((one >= PASSED).sum()), k) for one in enough]
        made.append(_estimate(f"pass@{k}", of_k, enough if k == 1 else None, seed))
        made.append(_estimate(f"best@{k}", [best_at_k(one, k) for one in enough], None, seed))
    return made


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n tries, of which c were right, have a right one among them.

    The unbiased estimator of arXiv:2107.03374, as the macro `pass_at_k` of the store.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def best_at_k(rewards: Sequence[float] | np.ndarray, k: int) -> float:
    """Return the mean over all choices of k tries of the best reward among them.

    >>> round(best_at_k([0.0, 1.0, 0.5], 2), 3)
    0.833
    """
    ordered = np.sort(np.asarray(rewards, np.float64))
    total, chance = 0.0, 1.0  # that none of those above is chosen
    for place in range(len(ordered) - 1, k - 2, -1):
        weight = k / (place + 1)
        total += chance * weight * float(ordered[place])
        chance *= 1 - weight
    return total


def wilson(right: int, tries: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share, without continuity correction.

    >>> low, high = wilson(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    share, z2 = right / tries, _Z * _Z
    middle = share + z2 / (2 * tries)
    half = _Z * math.sqrt(share * (1 - share) / tries + z2 / (4 * tries * tries))
    scale = 1 + z2 / tries
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def bootstrap(values: Sequence[float] | np.ndarray, *, seed: int) -> tuple[float, float]:
    """Return the percentile interval of a mean over tasks, drawn again with replacement."""
    values = np.asarray(values, np.float64)
    rng, means = np.random.default_rng(seed), np.empty(RESAMPLES)
    step = max(1, CELLS // len(values))
    for first in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - first)
        drawn = rng.integers(len(values), size=(size, len(values)))
        means[first : first + size] = values[drawn].mean(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _share(rewards: np.ndarray) -> float:
    return float((rewards >= PASSED).mean())


def _estimate(
    name: str, values: Sequence[float], tried: Sequence[np.ndarray] | None, seed: int
) -> Estimate:
    """Average over tasks; where each was tried once, `tried` gives the exact interval."""
    if not values:
        return Estimate(
            name=name, value=math.nan, low=None, high=None, num_tasks=0, interval="bootstrap"
        )
    if tried is not None and all(len(one) == 1 for one in tried):
        low, high = wilson(round(sum(values)), len(values))
        kind: Literal["wilson", "bootstrap"] = "wilson"
    else:
        low, high = bootstrap(values, seed=seed) if len(values) > 1 else (None, None)
        kind = "bootstrap"
    value = float(np.mean(values))
    return Estimate(
        name=name, value=value, low=low, high=high, num_tasks=len(values), interval=kind
    )
