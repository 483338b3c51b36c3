"""Sampling strategies: how the units of a step are chosen from the pool."""

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl

from ..errors import QueryError
from .unit_pool import Pool


class Strategy:
    """Chooses `n` units of a pool; by default with equal weights and without replacement."""

    name: ClassVar[str]
    priority: str | pl.Expr | None = None
    """The weights of units, an SQL or Polars expression; None for equal weights."""
    replacement: bool = False
    """Whether a unit may be drawn twice in one step."""

    def masses(self, priorities: np.ndarray) -> np.ndarray:
        """Return the mass of each priority, to which the probability of a draw is proportional."""
        return np.ones(len(priorities))

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return places in the pool in the order of the draw, and one importance weight each."""
        raise NotImplementedError

    def parameters(self) -> dict[str, Any]:
        """Return its parameters as JSON values."""
        return {"strategy": self.name}


@dataclass(frozen=True)
class Fifo(Strategy):
    """Oldest first; starts over when all units were drawn equally often."""

    name: ClassVar[str] = "fifo"

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `n` of those drawn least."""
        return pool.first(n), np.ones(n)


@dataclass(frozen=True)
class Uniform(Strategy):
    """Uniformly at random."""

    replacement: bool = False
    name: ClassVar[str] = "uniform"

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `n` places at random."""
        return pool.random(n, rng, replacement=self.replacement), np.ones(n)

    def parameters(self) -> dict[str, Any]:
        """Return its name, and whether it draws with replacement."""
        return {"strategy": self.name, "replacement": self.replacement}


@dataclass(frozen=True)
class Prioritized(Strategy):
    """Sample with probabilities proportional to priority ** alpha.

    P(i) = p_i^alpha / sum_k p_k^alpha over what may be drawn, and the importance weight
    w_i = (N P(i))^-beta / max_j w_j over the batch (Schaul et al. 2015, arXiv:1511.05952).

    Without replacement, units are drawn one after the other from those that are left (successive
    sampling); weights use P of the first draw. Units of priority 0 are never drawn. A row whose
    priority is NULL gets the largest of the drawable rows, as new rows do in the paper, or 1 when
    none is above 0. A group's priority is the mean over its drawable rows that have one.
    """

    priority: str | pl.Expr = "priority"  # pyright: ignore[reportIncompatibleVariableOverride]
    """A column, or an SQL or Polars expression over the columns of `experiences`, side columns,
    `age` (optimizer steps since the weights that wrote the row) and `times_drawn`."""
    alpha: float = 1.0
    """0 makes all positive priorities equal, 1 leaves them unchanged."""
    beta: float = 0.0
    """How far importance weights correct for unequal probabilities: 0 not at all, 1 fully."""
    replacement: bool = False
    name: ClassVar[str] = "prioritized"

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not (np.isfinite(value) and value >= 0):
                raise QueryError(f"`{name}` must be a finite number of 0 or more, got {value!r}")

    def masses(self, priorities: np.ndarray) -> np.ndarray:
        """Return p^alpha, 0 for a priority of 0, and NaN for an unknown one."""
        powers = priorities if self.alpha == 1.0 else priorities**self.alpha
        # NaN ** 0 is 1, and `0.0 * NaN` keeps it unknown
        return np.where(priorities == 0, 0.0, powers + 0.0 * priorities)

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `n` places by priority, and importance weights."""
        places = pool.random(n, rng, replacement=self.replacement)
        return places, importance(pool.chances(places), pool.size, self.beta)

    def parameters(self) -> dict[str, Any]:
        """Return its name, the expression as text, and its numbers."""
        return {
            "strategy": self.name,
            "priority": self.priority if isinstance(self.priority, str) else str(self.priority),
            "alpha": float(self.alpha),
            "beta": float(self.beta),
            "replacement": self.replacement,
        }


def importance(chances: np.ndarray, size: int, beta: float) -> np.ndarray:
    """Return importance weights of a batch: at most 1, for a pool of `size` units.

    >>> importance(np.array([0.5, 0.125]), 4, 1.0).tolist()
    [0.25, 1.0]
    """
    # by the largest of the batch, not of the pool: weights only ever scale a step down
    weights = (size * chances) ** -beta
    return weights / weights.max(initial=0.0)


def canonical(parameters: dict[str, Any]) -> str:
    """Return parameters as JSON text that is the same for equal parameters.

    >>> canonical({"strategy": "fifo", "name": None})
    '{"strategy":"fifo"}'
    """
    message = {key: value for key, value in parameters.items() if value is not None}
    return json.dumps(message, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


STRATEGIES: dict[str, type[Fifo] | type[Uniform] | type[Prioritized]] = {
    "fifo": Fifo,
    "uniform": Uniform,
    "prioritized": Prioritized,
}
"""All strategies by name."""
