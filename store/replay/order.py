"""In which order the rows of a run are taken up, while they come."""

from dataclasses import dataclass

import polars as pl
import pyarrow as pa

_PLACE = r"/\d{6,}/(\d{4,})(?:/|$)"
"""The place of a group in its step, in the ids of its rows (`store.ids`)."""


@dataclass(frozen=True)
class Order:
    """How rows that come one group after the other are put in order."""

    by_arrival: bool = False
    """As they were stored; else by step, group and id, however they arrived."""
    groups_per_step: int | None = None
    """How many groups each step has, if a row is to wait for all groups before its own."""


class Behind:
    """Holds back rows while a group before theirs is missing, so that they come in order."""

    def __init__(self, groups_per_step: int) -> None:
        self._size = groups_per_step
        self._held: pa.Table | None = None
        self._next = groups_per_step
        """The first group that is missing, counted through all steps; steps count from 1."""

    def released(self, rows: pa.Table) -> pa.Table:
        """Take in new rows with their ids; return those before which nothing is missing now.

        Rows that operators added belong to the group of the row that they were made from.
        """
        known = pa.concat_tables([self._held, rows]) if self._held is not None else rows
        columns = ["step", "experience_id", "parent_id"]
        frame = pl.DataFrame(pl.from_arrow(known.select(columns)))
        made_from = pl.coalesce("parent_id", "experience_id")
        last = pl.lit(self._size - 1)
        place = made_from.str.extract(_PLACE).cast(pl.Int64).fill_null(last)
        frame = frame.with_columns(number=pl.col("step").fill_null(0) * self._size + place)
        there = set(frame.filter(pl.col("parent_id").is_null())["number"])
        while self._next in there:
            self._next += 1
        is_free = frame["number"] < self._next
        self._held = known.filter((~is_free).to_arrow())
        return known.filter(is_free.to_arrow())
