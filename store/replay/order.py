"""The order in which a sampler takes up the rows of a run while they are being made."""

from dataclasses import dataclass

import polars as pl
import pyarrow as pa


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
