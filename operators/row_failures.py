"""Isolate the rows on which an operator fails, by bisection, and let the others through."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import polars as pl

from ..store.errors import OperatorError
from . import invariants
from .body import PLACE
from .kinds import REASON, Applied, OperatorSpec


class RowsFailed(OperatorError):
    """A body raised on the rows that it was given; on fewer of them it may succeed."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.reason = reason
        """The body's own error, on one line."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class FailureLimit:
    """Counts failed rows, and raises when there are more than `max_failed`."""

    op: OperatorSpec
    rows: int
    max_failed: int | None
    failed: int = 0

    def count(self, failed: pl.DataFrame) -> None:
        """Add failed rows; raises OperatorError when there are too many."""
        self.failed += failed.height
        if self.max_failed is not None and self.failed > self.max_failed:
            raise self.op.error(
                f"failed on {self.failed} of {self.rows} rows, more than the {self.max_failed} "
                f"allowed; the last error: {failed['error'][-1]}"
            )


def apply(op: OperatorSpec, rows: pl.DataFrame, max_failed: int | None) -> Applied:
    """Apply an operator to all rows; where it raises, to ever smaller parts of them."""
    limit = FailureLimit(op, rows.height, max_failed)
    try:
        applied = op.apply_once(rows)
    except RowsFailed as error:
        # nothing to bisect if the operator needs all rows, or fails whatever the rows are
        is_one = op.scope == "all" or (op.scope == "group" and "group_id" not in rows.columns)
        if is_one or not rows.height or _fails_without_rows(op, rows.schema):
            raise
        # parts are joined by id, so an id that occurs twice would multiply rows
        invariants.check_ids(rows, f"operator `{op.name}`")
        parts = list(_Bisection(op, rows, limit).parts(rows, error))
    else:
        limit.count(applied.failed)
        return applied
    joined = _joined(op, parts, rows)
    invariants.check(op, rows, joined.rows, joined.dropped)
    return joined


@dataclass
class _Bisection:
    """Search for the rows on which an operator fails."""

    op: OperatorSpec
    given: pl.DataFrame
    limit: FailureLimit

    def __post_init__(self) -> None:
        self._after = self.op.columns_after(self.given.schema).to_frame()

    def parts(self, rows: pl.DataFrame, error: RowsFailed) -> Iterator[Applied]:
        """Apply it to halves of rows on which it raised, down to one row or one group."""
        halves = _halves(self.op, rows)
        if not halves:
            yield self._counted(self._nothing_made(rows, error.reason))
        for half in halves:
            try:
                # among all rows, so that an augment recognizes copies whose ids are in another part
                yield self._counted(self.op.apply_once(half, among=self.given))
            except RowsFailed as further:
                yield from self.parts(half, further)

    def _counted(self, applied: Applied) -> Applied:
        self.limit.count(applied.failed)
        return applied

    def _nothing_made(self, rows: pl.DataFrame, error: str) -> Applied:
        """Return the outcome of rows on which the body raised, with nothing set."""
        op, key = self.op, invariants.id_column(rows.columns)
        failed = rows.select(key, pl.lit(error).alias("error"))
        reasons = failed.rename({"error": REASON})
        if op.kind in ("filter", "reshape"):
            return Applied(self._after, reasons, failed)
        if op.kind in ("clean", "augment"):
            return Applied(rows, reasons.clear(), failed)
        types = self._after.schema
        nulls = [pl.lit(None, types[name]).alias(name) for name in op.writes]
        return Applied(rows.with_columns(nulls).select(types.names()), reasons.clear(), failed)


def _halves(op: OperatorSpec, rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Split rows in two, between groups if the operator needs them; empty if there is one unit."""
    if op.scope == "row":
        half = rows.height // 2
        return [rows[:half], rows[half:]] if half else []
    groups = rows["group_id"].unique(maintain_order=True)
    first = groups[: len(groups) // 2]
    if first.is_empty():
        return []
    is_first = pl.col("group_id").is_in(first.implode(), nulls_equal=True)
    return [rows.filter(is_first), rows.filter(~is_first)]


def _joined(op: OperatorSpec, parts: list[Applied], rows: pl.DataFrame) -> Applied:
    """Join parts in the order of the given rows; new rows come last."""
    key = invariants.id_column(rows.columns)
    place = rows.select(key).with_row_index(PLACE)

    def in_order(found: pl.DataFrame) -> pl.DataFrame:
        both = found.join(place, on=key, how="left", maintain_order="left")
        return both.sort(PLACE, nulls_last=True, maintain_order=True).drop(PLACE)

    made = pl.concat([p.rows for p in parts], how="vertical_relaxed")
    return replace(
        parts[0],
        rows=made if op.kind == "reshape" else in_order(made),
        dropped=in_order(pl.concat([p.dropped for p in parts])),
        failed=in_order(pl.concat([p.failed for p in parts])),
    )


def _fails_without_rows(op: OperatorSpec, given: pl.Schema) -> bool:
    try:
        op.columns_after(given)
    except OperatorError:
        return True
    return False
