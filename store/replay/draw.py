"""Draws: the order and freshness of the rows to draw from, their supply, and what was drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import pyarrow as pa

from ..errors import QueryError


@dataclass(frozen=True)
class Order:
    """How rows that arrive one group after the other are put in order."""

    by_arrival: bool = False
    """As they were stored; else by batch, group and id, however they arrived."""
    groups_per_batch: int | None = None
    """Groups in each batch, if a row is to wait for all groups before its own."""


class Behind:
    """Holds rows back while an earlier group is missing, so that they are released in order."""

    def __init__(self, groups_per_batch: int) -> None:
        self._size = groups_per_batch
        self._held: pa.Table | None = None
        self._next = groups_per_batch
        """The first missing group, counted through all batches; batches count from 1."""

    def released(self, rows: pa.Table) -> pa.Table:
        """Take in new rows; return those before which no group is missing now."""
        known = pa.concat_tables([self._held, rows]) if self._held is not None else rows
        frame = pl.DataFrame(pl.from_arrow(known.select(["batch", "group_index"])))
        # a row without a place counts as the last of its batch, which waits for all others
        place = pl.col("group_index").fill_null(self._size - 1)
        number = frame.select(pl.col("batch").fill_null(0) * self._size + place).to_series()
        there = set(number)
        while self._next in there:
            self._next += 1
        is_free = number < self._next
        self._held = known.filter((~is_free).to_arrow())
        return known.filter(is_free.to_arrow())


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
