"""Estimates from the rollouts of tasks: mean reward, pass@k and best@k, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

PASSED = 1.0
"""A rollout with at least this reward is correct."""
CONFIDENCE = 0.95
RESAMPLES = 2000
_Z = 1.959963984540054
"""The standard normal's quantile at (1 + CONFIDENCE) / 2."""
CELLS = 1 << 22
"""Most numbers resampled in one batch, which bounds memory."""

Scores = Sequence[Sequence[float]]
"""The rewards of each task's rollouts; rewards that could not be computed are left out."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate with its 95 % confidence interval."""

    name: str
    """accuracy, reward_mean, pass@K, best@K."""
    value: float
    low: float | None
    """None: too few tasks for an interval."""
    high: float | None
    num_tasks: int
    """Tasks with enough rollouts for this estimate."""
    interval: Literal["wilson", "bootstrap"]
    """Wilson's where each task has one rollout; else a bootstrap over tasks."""


def estimates(scores: Scores, *, ks: Sequence[int] = (), seed: int = 0) -> list[Estimate]:
    """Return the share of correct rollouts, the mean reward, and pass@k and best@k for each k.

    >>> [(e.name, e.value) for e in estimates([[1.0, 0.0], [0.0, 0.5]], ks=[2])]
    [('accuracy', 0.25), ('reward_mean', 0.375), ('pass@2', 0.5), ('best@2', 0.75)]
    """
    # A task without a score is unknown, and not wrong.
    rollouts = [np.asarray(one, np.float64) for one in scores if len(one)]
    made = [
        _estimate("accuracy", [_share(one) for one in rollouts], rollouts, seed),
        _estimate("reward_mean", [one.mean() for one in rollouts], None, seed),
    ]
    for k in ks:
        enough = [one for one in rollouts if len(one) >= k]
        of_k = [pass_at_k(len(one), int((one >= PASSED).sum()), k) for one in enough]
        made.append(_estimate(f"pass@{k}", of_k, enough if k == 1 else None, seed))
        made.append(_estimate(f"best@{k}", [best_at_k(one, k) for one in enough], None, seed))
    return made


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n rollouts, of which c are correct, include a correct one.

    The unbiased estimator of arXiv:2107.03374, as the macro `pass_at_k` of the store.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if n - c < k:
        return 1.0
    # A product, because the binomial coefficients of many rollouts are too large for floats.
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def best_at_k(rewards: Sequence[float] | np.ndarray, k: int) -> float:
    """Return the best reward of k rollouts, averaged over all choices of k.

    >>> round(best_at_k([0.0, 1.0, 0.5], 2), 3)
    0.833
    """
    ordered = np.sort(np.asarray(rewards, np.float64))
    total, chance = 0.0, 1.0  # the probability that none of the better ones was chosen
    for index in range(len(ordered) - 1, k - 2, -1):
        weight = k / (index + 1)
        total += chance * weight * float(ordered[index])
        chance *= 1 - weight
    return total


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share, without continuity correction.

    >>> low, high = wilson(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    share, z2 = correct / total, _Z * _Z
    middle = share + z2 / (2 * total)
    half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    scale = 1 + z2 / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def bootstrap(values: Sequence[float] | np.ndarray, *, seed: int) -> tuple[float, float]:
    """Return the percentile interval of the mean, from tasks resampled with replacement."""
    values = np.asarray(values, np.float64)
    # Tasks are resampled and not rollouts, because the rollouts of a task depend on each other.
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
    name: str, values: Sequence[float], rollouts: Sequence[np.ndarray] | None, seed: int
) -> Estimate:
    """Average over tasks; with one rollout per task, `rollouts` allows Wilson's interval."""
    low, high, size = None, None, len(values)
    kind: Literal["wilson", "bootstrap"] = "bootstrap"
    if size and rollouts is not None and all(len(one) == 1 for one in rollouts):
        (low, high), kind = wilson(round(sum(values)), size), "wilson"
    elif size > 1:
        low, high = bootstrap(values, seed=seed)
    value = float(np.mean(values)) if size else math.nan
    return Estimate(name=name, value=value, low=low, high=high, num_tasks=size, interval=kind)
