"""Writers of sinks, part by part; rows that the sink has already are left out."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl

from ...operators import Operator
from ...store import Appended, Store
from .. import sink as sinks
from ..source import File, Table
from .append import Appending, Maker, Pairs
from .files import FileWriter
from .latest_values import Before, Scores, Values

__all__ = ["Before", "Collected", "Maker", "Writer", "opened"]


def opened(
    sink: Table | File | None,
    store: Store,
    schema: pl.Schema,
    *,
    maker: Maker,
    read: pl.Series,
    operators: Sequence[Operator] = (),
    before: Before | None = None,
) -> "Writer":
    """Return the writer of a sink, for rows with the columns `schema`.

    `read` are ids of rows that came from the store, which are not written again. `operators` made
    the rows, in the pipeline run `maker`. `before` are values of earlier runs that are withdrawn
    unless this run sets them again.
    """
    if sink is None:
        return Collected(schema)
    if isinstance(sink, File):
        return FileWriter(Path(sink.file), schema)
    if sink.table in sinks.VALUES:
        made_by = sinks.made_by(operators)
        return Values(store, sink.table, made_by, maker, before=before)
    if sink.table == "scores" and any(op.scope != "row" for op in operators):
        return Scores(store, maker)
    if sink.table == "preferences":
        return Pairs(store, maker)
    forms: Mapping[str, Callable[[pl.DataFrame], pl.DataFrame]] = {
        "tasks": sinks.as_tasks,
        "scores": sinks.as_scores,
        "experiences": lambda rows: rows.filter(~pl.col("experience_id").is_in(read.implode())),
    }
    return Appending(store, sink.table, maker, forms.get(sink.table, lambda rows: rows))


class Collected:
    """Keeps the rows, for a pipeline without a sink."""

    def __init__(self, schema: pl.Schema) -> None:
        self._parts = [schema.to_frame()]

    def put(self, rows: pl.DataFrame) -> None:
        """Keep a part."""
        self._parts.append(rows)

    def done(self) -> Appended:
        """Return the number of rows."""
        return Appended(self.rows.height, 0, 0)

    @property
    def rows(self) -> pl.DataFrame:
        """All rows."""
        self._parts = [pl.concat(self._parts)]
        return self._parts[0]

    def close(self) -> None:
        """Do nothing."""


Writer = Collected | FileWriter | Appending
"""What `opened` returns."""
