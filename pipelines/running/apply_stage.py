"""Apply a stage's operators to a partition, each to the columns that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

import numpy as np
import polars as pl

from ...operators import Applied, Operator
from ...operators.invariants import id_column
from ..cache import OperatorCache
from ..report import Step
from .column_pruning import given_to
from .staged_rows import Part, StagedRows


@dataclass(frozen=True)
class StageWork:
    """The work of a stage on each of its partitions; it can be sent to other processes."""

    held: StagedRows
    operators: tuple[Operator, ...]
    given: tuple[tuple[str, ...] | None, ...]
    """The columns that each operator gets; None: all."""
    max_failed: int | None
    """Rows of the stage on which an operator may fail."""
    known: pl.Series | None
    """Ids of all rows of the stage, if an operator adds rows."""

    @classmethod
    def of(
        cls, held: StagedRows, operators: Sequence[Operator], max_failed: int | None
    ) -> "StageWork":
        """Plan which columns each operator gets."""
        given, schema = [], held.schema
        for op in operators:
            given.append(given_to(op, schema))
            schema = op.columns_after(schema)
        makes_rows = any(op.kind == "augment" for op in operators)
        key = id_column(list(held.schema)) if makes_rows else ""
        known = held.light([key])[key] if makes_rows else None
        return cls(held, tuple(operators), tuple(given), max_failed, known)

    @cached_property
    def schema(self) -> pl.Schema:
        """The columns of the rows that come out."""
        schema = self.held.schema
        for op in self.operators:
            schema = op.columns_after(schema)
        return schema


@dataclass(frozen=True)
class Treated:
    """The outcome of a partition."""

    rows: pl.DataFrame
    places: np.ndarray
    """The index of each row in the stage, ascending; new rows come after all others."""
    dropped: tuple[pl.DataFrame, ...]
    """For each operator, ids with a `reason`."""
    failed: tuple[pl.DataFrame, ...]
    """For each operator, ids with an `error`."""
    steps: tuple[Step, ...]
    num_rows: int = 0
    """Rows of the partition."""


_NO_ROWS, _NO_PLACES = pl.DataFrame(), np.empty(0, np.int64)


def treat(work: StageWork, part: Part, cache: OperatorCache) -> Treated:
    """Read a partition and apply the operators; the result is as if each had got all columns."""
    rows, places = work.held.read(part), part.places
    done: list[Treated] = []
    for op, names in zip(work.operators, work.given, strict=True):
        if not rows.height:
            # not applied, since a model need not accept an empty batch; later operators still need
            # the columns
            rows = op.columns_after(rows.schema).to_frame()
            continue
        began, before = perf_counter(), rows
        given = before if names is None else before.select(names)
        applied, cached = cache.apply(op, given, max_failed=work.max_failed)
        rows = applied.rows if names is None else widened(op, before, applied.rows)
        places = _places(op, before, places, rows, work.held.height)
        if op.kind == "augment" and work.known is not None:
            is_new = _is_new(op, before.height, rows, work.known)
            rows, places = rows.filter(pl.lit(is_new)), places[is_new.to_numpy()]
        made = replace(applied, rows=rows)
        done.append(stepped(op, before, made, cached, perf_counter() - began))
    rows = _conformed(rows, work)
    order = np.argsort(places, kind="stable")
    if (np.diff(order) != 1).any():
        rows, places = rows[order], places[order]
    return Treated(
        rows,
        places,
        tuple(d for t in done for d in t.dropped),
        tuple(f for t in done for f in t.failed),
        tuple(s for t in done for s in t.steps),
        len(part.places),
    )


def stepped(
    op: Operator, before: pl.DataFrame, applied: Applied, cached: int, seconds: float
) -> Treated:
    """Return the outcome of one operator, without the rows."""
    failed = applied.failed
    step = Step(
        op.name,
        op.kind,
        before.height,
        applied.rows.height,
        failed.height,
        cached,
        seconds,
        failed["error"][-1] if failed.height else None,
    )
    return Treated(_NO_ROWS, _NO_PLACES, (applied.dropped,), (failed,), (step,), before.height)


def _conformed(rows: pl.DataFrame, work: StageWork) -> pl.DataFrame:
    """Cast columns to the types that they have in every partition.

    A partition whose values are all NULL has no type of its own. Raises OperatorError for columns
    whose type differs from the one inferred without rows.
    """
    schema = work.schema
    if list(rows.schema.items()) == list(schema.items()):
        return rows
    for name, kind in schema.items():
        got = rows.schema.get(name)
        if got not in (kind, pl.Null):
            makers = [op for op in work.operators if name in op.writes] or [*work.operators]
            raise makers[-1].error(
                f"column `{name}` came out as {got or 'nothing'}, expected {kind}, as without "
                "rows; cast it"
            )
    return rows.select(pl.col(name).cast(kind) for name, kind in schema.items())


def widened(op: Operator, before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Add the columns that an operator did not get to the rows that it returned."""
    if op.kind == "reshape":
        return after
    # The other kinds that get fewer columns keep each row in its place.
    if op.kind != "filter":
        return before.with_columns(after.select(*_set(op, before, after)).get_columns())
    key = id_column(before.columns)
    rows = before
    if after.height < before.height:
        rows = before.filter(before[key].is_in(after[key].implode()))
    if not op.writes:
        return rows
    # A filter may return its rows in another order.
    if not rows[key].equals(after[key]):
        after = rows.select(key).join(after, on=key, how="left", maintain_order="left")
    return rows.with_columns(after.select(*_set(op, before, after)).get_columns())


def _set(op: Operator, before: pl.DataFrame, after: pl.DataFrame) -> list[str]:
    return [n for n in after.columns if n in op.writes or n not in before.columns]


def _places(
    op: Operator, before: pl.DataFrame, places: np.ndarray, after: pl.DataFrame, height: int
) -> np.ndarray:
    """Return the indices of rows in the stage; new rows follow, in the order of their parents."""
    if op.kind in ("clean", "derive", "prioritize") or after.height == 0:
        return places if after.height else places[:0]
    key = id_column(before.columns)
    if op.kind == "filter":
        if after.height == before.height and after[key].equals(before[key]):
            return places
        return _found(before[key], places, after[key])
    if op.kind == "augment":
        new = after["parent_id"][before.height :]
        return np.append(places, height + _found(before[key], places, new))
    return _found(before[key], places, after[op.links[0]])


def _found(ids: pl.Series, places: np.ndarray, wanted: pl.Series) -> np.ndarray:
    known = pl.DataFrame({"id": ids, "place": places})
    rows = wanted.alias("id").to_frame().join(known, on="id", how="left", maintain_order="left")
    return rows["place"].to_numpy()


def _is_new(op: Operator, old: int, rows: pl.DataFrame, known: pl.Series) -> pl.Series:
    """Return which rows to keep: a new row whose id is in another partition was made before.

    Raises OperatorError if such an id is not the one that the operator derives from the parent.
    """
    key = id_column(rows.columns)
    new = rows[old:]
    is_known = new[key].is_in(known.implode())
    own = pl.format("{}/{}-{}", "parent_id", pl.lit(op.name), pl.lit(op.fingerprint[:8]))
    is_own = new.select(pl.col(key).str.starts_with(own)).to_series()
    wrong = new.filter(pl.lit(is_known & ~is_own))
    if wrong.height:
        raise op.error(
            f"`{key}` {wrong[key][0]!r} is not the id of one row; each new row needs a fresh id"
        )
    stays = pl.repeat(True, old, dtype=pl.Boolean, eager=True)  # noqa: FBT003
    return stays.append(~is_known)
