"""Strategies: how a step's units are chosen among those that may be drawn."""

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import polars as pl

from ..errors import QueryError
from .unit_pool import Pool


class Strategy(Protocol):
    """Chooses `n` of a pool; returns places in it, and one importance weight each."""

    name: ClassVar[str]

    @property
    def priority(self) -> str | pl.Expr | None:
        """What units are weighed by: an SQL or Polars expression; None when all weigh the same."""
        ...

    @property
    def replacement(self) -> bool:
        """Whether a unit may be drawn twice in one step."""
        ...

    def masses(self, priorities: np.ndarray) -> np.ndarray:
        """Return the mass of each priority: the chance of a draw is in proportion to it."""
        ...

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return places in the pool in the order of the draw, and importance weights."""
        ...

    def parameters(self) -> dict[str, Any]:
        """Return what describes it, as values of JSON."""
        ...


@dataclass(frozen=True)
class Fifo:
    """Oldest first; when all were drawn as often, from the start again."""

    name: ClassVar[str] = "fifo"

    @property
    def priority(self) -> None:
        """All weigh the same."""
        return None

    @property
    def replacement(self) -> bool:
        """No unit comes twice in one step."""
        return False

    def masses(self, priorities: np.ndarray) -> np.ndarray:
        """All weigh the same."""
        return np.ones(len(priorities))

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `n` of those drawn least."""
        return pool.first(n), np.ones(n)

    def parameters(self) -> dict[str, Any]:
        """Only its name."""
        return {"strategy": self.name}


@dataclass(frozen=True)
class Uniform:
    """Each as likely as any other."""

    replacement: bool = False
    """Whether a unit may be drawn twice in one step."""
    name: ClassVar[str] = "uniform"

    @property
    def priority(self) -> None:
        """All weigh the same."""
        return None

    def masses(self, priorities: np.ndarray) -> np.ndarray:
        """All weigh the same."""
        return np.ones(len(priorities))

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `n` places at random."""
        return pool.random(n, rng, replacement=self.replacement), np.ones(n)

    def parameters(self) -> dict[str, Any]:
        """Its name, and whether units are put back."""
        return {"strategy": self.name, "replacement": self.replacement}


@dataclass(frozen=True)
class Prioritized:
    """Each with a chance in proportion to its priority to the power of `alpha`.

    P(i) = p_i^alpha / sum_k p_k^alpha over what may be drawn, and the importance weight
    w_i = (N P(i))^-beta / max_j w_j over the batch (Schaul et al. 2015, arXiv:1511.05952).

    Without replacement units are drawn one after the other, each out of those that are left
    (successive sampling); weights use P of the first draw. A priority of 0 is never drawn. A row
    whose priority is NULL gets the largest of those that may be drawn, as new rows do in the
    paper, or 1 when none is above 0. A group's priority is the mean over its rows that may be
    drawn and have one.
    """

    priority: str | pl.Expr = "priority"
    """A column, or an SQL or Polars expression over the columns of `experiences`, side columns,
    `age` (optimizer steps since the weights that wrote the row) and `times_drawn`."""
    alpha: float = 1.0
    """0 makes all priorities above 0 equal, 1 takes them as they are."""
    beta: float = 0.0
    """How far importance weights make up for the unequal chances: 0 not at all, 1 in full."""
    replacement: bool = False
    """Whether a unit may be drawn twice in one step."""
    name: ClassVar[str] = "prioritized"

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not (np.isfinite(value) and value >= 0):
                raise QueryError(f"`{name}` must be a finite number of 0 or more, got {value!r}")

    def masses(self, priorities: np.ndarray) -> np.ndarray:
        """Return p^alpha, and 0 for a priority of 0; NaN, which is not known, stays."""
        powers = priorities if self.alpha == 1.0 else priorities**self.alpha
        return np.where(priorities == 0, 0.0, powers + 0.0 * priorities)

    def choose(self, pool: Pool, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return `n` places by priority, and importance weights."""
        places = pool.random(n, rng, replacement=self.replacement)
        return places, importance(pool.chances(places), pool.size, self.beta)

    def parameters(self) -> dict[str, Any]:
        """Its name, the expression as text, and its numbers."""
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
