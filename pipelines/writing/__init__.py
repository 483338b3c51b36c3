"""Writers: rows go to a sink part by part, and what the sink holds already is left out."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import polars as pl

from ...operators import Operator
from ...store import Appended, Store
from .. import sink as sinks
from ..source import File, Table
from .append import Appending, Maker, Pairs
from .files import FileWriter
from .latest_values import Before, Scores, Values

__all__ = ["Before", "Collected", "Maker", "Writer", "opened"]


class Writer(Protocol):
    """Takes a pipeline's rows."""

    def put(self, rows: pl.DataFrame) -> None:
        """Write a part of the rows."""
        ...

    def done(self) -> Appended:
        """Return what was written, when all of it was put."""
        ...

    def close(self) -> None:
        """Leave nothing half-done behind."""
        ...


def opened(
    sink: Table | File | None,
    store: Store,
    schema: pl.Schema,
    *,
    maker: Maker,
    read: pl.Series,
    operators: Sequence[Operator] = (),
    before: Before | None = None,
) -> Writer:
    """Return the writer of a sink, for rows with the columns `schema`.

    `read` are the ids that came from the store: those rows are stored, and stay as they are.
    `operators` made the rows, in the pipeline run that `maker` names. `before` says which values of
    earlier runs, that are not said again, are taken back.
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
        """Return how many rows there are."""
        return Appended(self.rows.height, 0, 0)

    @property
    def rows(self) -> pl.DataFrame:
        """All rows."""
        self._parts = [pl.concat(self._parts)]
        return self._parts[0]

    def close(self) -> None:
        """Nothing is open."""
