"""Draws: the freshness limit, the supply to draw from, and the rows that were drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..errors import QueryError


@dataclass(frozen=True)
class Freshness:
    """The limit on staleness: a row may lag at most `max_lag` optimizer steps."""

    max_lag: int | None = None
    """None: rows of any age."""

    def oldest(self, policy_version: int) -> int | None:
        """Return the oldest version that is fresh for weights of `policy_version`; None: any."""
        return None if self.max_lag is None else policy_version - self.max_lag


@dataclass(frozen=True)
class Supply:
    """The units available to a step that needs `need` of them."""

    need: int
    fresh: int
    """Those that may be drawn."""
    stale: int
    used_up: int
    unit: str
    weightless: int = 0
    """Fresh ones whose priority is 0, which are never drawn."""
    draws: int | None = 0
    """How many may be drawn in one step; None: any number, with replacement."""
    parts: Mapping[str, "Supply"] = field(default_factory=dict)
    """For a mixture, the supply of each source."""

    @property
    def enough(self) -> bool:
        """Whether the step can be drawn."""
        if self.parts:
            return all(part.enough for part in self.parts.values())
        return self.draws is None or self.draws >= self.need

    def __str__(self) -> str:
        if self.parts:
            message = "; ".join(f"`{name}`: {part}" for name, part in self.parts.items())
            return f"need {self.need} {self.unit} of {len(self.parts)} sources ({message})"
        weightless = f", {self.weightless} of priority 0" if self.weightless else ""
        return (
            f"need {self.need} {self.unit}, have {self.fresh} fresh, {self.stale} stale, "
            f"{self.used_up} drawn as often as allowed{weightless}"
        )


@dataclass(frozen=True)
class Draw:
    """The rows of one step, in order: addresses for `read`, and what `draws` records."""

    step: int
    row_ids: np.ndarray
    allowed: np.ndarray
    """False for rows that are read only because their group's statistics need them."""
    weights: np.ndarray
    """Importance weight of each row, at most 1 within a source."""
    epochs: np.ndarray
    """How often each row has been drawn, including this draw."""
    sources: tuple[str | None, ...]
    """The named source of each row; None for those of a plain sampler."""
    drawn_from: dict[str, int]
    """The version of each table that was read, which determines the rows of the draw."""

    def __len__(self) -> int:
        return len(self.row_ids)


def check_size(n: int, unit: str) -> None:
    """Raise QueryError for a step of no rows."""
    if n < 1:
        raise QueryError(f"a step must draw 1 or more {unit}, got {n}")
