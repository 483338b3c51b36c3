"""Operator: one thing to do to rows, with its parameters, and the law of its kind enforced."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import polars as pl

from ..store.errors import OperatorError, QueryError, RlakeError, nearest
from ..store.ids import content_id
from . import laws
from .body import ERROR, Explained, PlainBody, describe, produce
from .scope import Sees
from .waiting import told

Kind = Literal["clean", "derive", "filter", "prioritize", "augment", "reshape"]
"""What an operator may do, by the law that it obeys; see `laws`."""

Frame = TypeVar("Frame", pl.LazyFrame, pl.DataFrame)

KEEP, REASON = "keep", "reason"
"""Columns by which a filter's body may mark every row, instead of leaving rows out."""


class RowsFailed(OperatorError):
    """A body raised on the rows that it was given; on fewer of them it may not."""

    def __init__(self, who: str, error: Exception) -> None:
        self.told = told(error)
        super().__init__(f"{who} {(self.told.splitlines() or [''])[0]}")


@dataclass(frozen=True)
class Applied:
    """What an operator made of rows."""

    rows: pl.DataFrame
    dropped: pl.DataFrame
    """The ids of rows that went, each with its `reason`."""
    failed: pl.DataFrame
    """The ids of rows on which it raised, each with its `error`."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One thing to do to rows: `rows.pipe(operator)` works with any frame."""

    name: str
    kind: Kind
    params: Mapping[str, Any]
    """All parameters, defaults included, as they are recorded."""
    path: str
    """Where its function is imported from, as `module:function`."""
    version: int
    """Raised when its meaning changes."""
    body: PlainBody = field(repr=False, compare=False)
    reads: tuple[str, ...]
    """Columns that must be there."""
    reads_rest: bool
    """Whether it may look at other columns too."""
    writes: tuple[str, ...]
    """Columns that it sets or adds."""
    sees: Sees
    """What it looks at to treat a row: that row alone, its group, or all rows."""
    whole_groups: bool
    """Whether it computes over, or keeps and drops, groups as a whole."""
    links: tuple[str, ...]
    """For a reshape: columns of the new rows that name rows that came in."""

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what it does: the same function, version and parameters give the same text."""
        return content_id(self.path, self.version, dict(self.params))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.params.items())})"

    # a type variable, not @overload: typing keeps overloads, and so DuckDB's objects, past the end
    def __call__(self, frame: Frame) -> Frame:
        """Apply it: lazily to a LazyFrame; at once, with its law checked, to a DataFrame.

        Raises OperatorError when it fails on any row; `apply` goes on with the others.
        """
        if isinstance(frame, pl.DataFrame):
            return self.apply(frame, max_failed=0).rows
        self.check_columns(frame)
        return self._finish(self._produce(frame).drop(ERROR, strict=False), frame)

    def apply(self, rows: pl.DataFrame, *, max_failed: int | None = None) -> Applied:
        """Apply it to rows in memory and check the law of its kind.

        A row on which it raises keeps its error in `failed`: what the operator sets is NULL there
        (a clean leaves it as it was), and a filter drops it. Of an operator that looks at groups,
        all rows of the group fail; of one that looks at all rows, none can.

        Raises OperatorError when the law is broken, a column is missing, the body fails whatever
        the rows are, or more than `max_failed` rows fail.
        """
        self.check_columns(rows.lazy())
        parts = list(_pieces(self, rows, _Limit(self, rows.height, max_failed)))
        if len(parts) == 1:
            return parts[0]
        made = pl.concat([p.rows for p in parts], how="vertical_relaxed")
        return Applied(
            _in_order(made, rows) if self.kind != "reshape" else made,
            pl.concat([p.dropped for p in parts]),
            pl.concat([p.failed for p in parts]),
        )

    def apply_once(self, rows: pl.DataFrame) -> Applied:
        """Apply it to rows that are not cut; raises RowsFailed when the body raises."""
        frame, key = rows.lazy(), laws.id_column(rows.columns)
        with self._boundary():
            # the streaming engine adds up in another order each time: other last bits
            produced = self._produce(frame).collect(engine="in-memory")
        failed = _errors(produced, key)
        produced = self._explained(produced.drop(ERROR, strict=False), rows, failed)
        laws.check_produced(self, rows, produced)
        with self._boundary():
            made = self._finish(produced.lazy(), frame).collect(engine="in-memory")
            dropped = self._dropped(produced.lazy(), frame).collect(engine="in-memory")
        laws.check(self, rows, made, dropped)
        return Applied(made, dropped.select(key, REASON), failed)

    def failed(self, rows: pl.DataFrame, error: str) -> Applied:
        """Return what becomes of rows on which the body raised: nothing is set, and they say so."""
        key = laws.id_column(rows.columns)
        failed = rows.select(key, pl.lit(error).alias("error"))
        none = failed.head(0).select(key, pl.col("error").alias(REASON))
        if self.kind == "filter":
            return Applied(
                self._empty(rows.schema), failed.select(key, pl.col("error").alias(REASON)), failed
            )
        if self.kind == "reshape":
            return Applied(
                self._empty(rows.schema), failed.select(key, pl.col("error").alias(REASON)), failed
            )
        if self.kind in ("clean", "augment"):
            return Applied(rows, none, failed)
        after = self.columns_after(rows.schema)
        nulls = [pl.lit(None, after[name]).alias(name) for name in self.writes]
        return Applied(rows.with_columns(nulls).select(after.names()), none, failed)

    def split(self, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the rows kept, and the rows dropped with the column `reason` beside.

        >>> from rlake.operators import keep
        >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "reward": [1.0, 0.0]})
        >>> keep(where="reward > 0").split(rows)[1].rows()
        [('b', 0.0, 'not true: reward > 0')]
        """
        applied = self.apply(rows, max_failed=0)
        key = laws.id_column(rows.columns)
        return applied.rows, rows.join(applied.dropped, on=key, how="inner", maintain_order="left")

    def columns_after(self, given: pl.Schema) -> pl.Schema:
        """Return the columns that rows with the columns `given` have afterwards, without any row.

        Raises OperatorError when a column is missing, or the body does not fit the columns.
        """
        frame = given.to_frame().lazy()
        with self._boundary():
            return self(frame).collect_schema()

    def check_columns(self, frame: pl.LazyFrame) -> None:
        """Raise OperatorError when a column that it reads is not there."""
        names = frame.collect_schema().names()
        laws.id_column(names, self)
        for name in self.reads:
            if name not in names:
                raise self.error(f"reads column `{name}`, which is not there{nearest(name, names)}")

    def error(self, told: str) -> OperatorError:
        """Build an error that names this operator."""
        return OperatorError(f"operator `{self.name}` ({self.kind}): {told}")

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        """Name this operator in whatever its body, which is anyone's code, raises."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RlakeError) and not isinstance(error, QueryError):
                raise
            raise RowsFailed(f"operator `{self.name}` ({self.kind}): failed with", error) from error

    def _explained(
        self, produced: pl.DataFrame, rows: pl.DataFrame, failed: pl.DataFrame
    ) -> pl.DataFrame:
        """Give rows that failed within a body that goes on what belongs to the kind."""
        if failed.is_empty():
            return produced
        key = laws.id_column(rows.columns)
        told = produced.select(key).join(failed, on=key, how="left", maintain_order="left")
        is_failed = pl.lit(told["error"].is_not_null())
        if self.kind == "filter":
            given = pl.col(REASON) if REASON in produced.columns else pl.lit(None, pl.String)
            reason = pl.coalesce(pl.lit(told["error"]), given)
            return produced.with_columns(
                pl.when(is_failed).then(False).otherwise(KEEP).alias(KEEP),  # noqa: FBT003
                reason.alias(REASON),
            )
        old = [n for n in self.writes if self.kind == "clean" and n in rows.columns]
        return produced.with_columns(
            pl.when(is_failed).then(pl.lit(rows[n])).otherwise(n).alias(n) for n in old
        )

    def _empty(self, given: pl.Schema) -> pl.DataFrame:
        return self.columns_after(given).to_frame()

    def _produce(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        into = KEEP if self.kind == "filter" else self.writes[0] if len(self.writes) == 1 else None
        made = produce(self.body, frame, into=into)
        if not isinstance(made, pl.LazyFrame):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise self.error(f"its body returned a {type(made).__name__}, expected a LazyFrame")
        return made

    def _finish(self, produced: pl.LazyFrame, frame: pl.LazyFrame) -> pl.LazyFrame:
        if self.kind == "filter":
            kept = self._marked(produced, frame).filter(KEEP)
            return kept.drop(KEEP, REASON)
        if self.kind == "augment":
            return pl.concat([frame, self._named(produced, frame)], how="diagonal_relaxed")
        return produced

    def _dropped(self, produced: pl.LazyFrame, frame: pl.LazyFrame) -> pl.LazyFrame:
        key = laws.id_column(frame.collect_schema().names())
        if self.kind == "filter":
            return self._marked(produced, frame).filter(~pl.col(KEEP)).select(key, REASON)
        if self.kind == "reshape":
            used = pl.concat([produced.select(pl.col(c).alias(key)) for c in self.links])
            # the reason is told over all rows: it may speak of the group
            told = frame.select(key, self._reason().alias(REASON))
            return told.join(used, on=key, how="anti", maintain_order="left")
        return frame.select(key, pl.lit("").alias(REASON)).head(0)

    def _marked(self, produced: pl.LazyFrame, frame: pl.LazyFrame) -> pl.LazyFrame:
        """Return all rows, each with `keep` and `reason`, whichever form the body has."""
        before, names = frame.collect_schema().names(), produced.collect_schema().names()
        key = laws.id_column(before)
        if KEEP in names and KEEP not in before:
            kind = produced.collect_schema()[KEEP]
            if kind != pl.Boolean:
                raise self.error(f"its condition is {kind}, expected true or false")
            marked = produced.with_columns(pl.col(KEEP).fill_null(False))  # noqa: FBT003
        else:
            kept = produced.select(key, *self.writes).with_columns(pl.lit(True).alias(KEEP))  # noqa: FBT003
            marked = frame.join(kept, on=key, how="left", maintain_order="left")
            marked = marked.with_columns(pl.col(KEEP).fill_null(False))  # noqa: FBT003
        if REASON in names and REASON not in before and KEEP in names:
            return marked.with_columns(pl.coalesce(REASON, self._reason()))
        return marked.with_columns(self._reason().alias(REASON))

    def _reason(self) -> pl.Expr:
        given = self.body.reason if isinstance(self.body, Explained) else None
        if isinstance(given, pl.Expr):
            return given
        return pl.lit(given or f"keep is false: {describe(self.body)}")

    def _named(self, produced: pl.LazyFrame, frame: pl.LazyFrame) -> pl.LazyFrame:
        """Name new rows without an id after their parent, in a group of their own and of no run.

        Such a row that is there already was made before, and is left out.
        """
        names, given_types = produced.collect_schema().names(), frame.collect_schema()
        key = laws.id_column(given_types.names())
        place = pl.int_range(pl.len()).over("parent_id")
        again = pl.when(place > 0).then(pl.format(".{}", place)).otherwise(pl.lit(""))
        fresh = pl.format(
            "{}/{}-{}{}", "parent_id", pl.lit(self.name), pl.lit(self.fingerprint[:8]), again
        )
        given = pl.col(key) if key in names else pl.lit(None, pl.String)
        known = frame.select(pl.col(key).alias("_id"), pl.lit(True).alias("_known"))  # noqa: FBT003
        named = (
            produced.with_columns(_id=fresh)
            .join(known, on="_id", how="left", maintain_order="left")
            .filter(given.is_not_null() | pl.col("_known").is_null())
            .with_columns(pl.coalesce(given, "_id").alias(key))
            .drop("_id", "_known")
        )
        if "group_id" in names:
            named = named.with_columns(pl.coalesce("group_id", key).alias("group_id"))
        of_a_run = [n for n in laws.OF_A_RUN if n in given_types]
        return named.with_columns(pl.lit(None, given_types[n]).alias(n) for n in of_a_run)


@dataclass
class _Limit:
    """How many rows may fail."""

    op: Operator
    rows: int
    max_failed: int | None
    failed: int = 0

    def count(self, failed: pl.DataFrame) -> None:
        self.failed += failed.height
        if self.max_failed is not None and self.failed > self.max_failed:
            raise self.op.error(
                f"failed on {self.failed} of {self.rows} rows, more than the {self.max_failed} "
                f"allowed; the last error: {failed['error'][-1]}"
            )


def _pieces(op: Operator, rows: pl.DataFrame, limit: _Limit) -> Iterator[Applied]:
    """Apply it to all rows or, where it raises, to halves, down to what is treated as one."""
    try:
        applied = op.apply_once(rows)
        limit.count(applied.failed)
        yield applied
        return
    except RowsFailed as error:
        halves = _halves(op, rows)
        if op.sees == "all" or not rows.height or _fails_without_rows(op, rows.schema):
            raise
        if not halves:
            applied = op.failed(rows, error.told)
            limit.count(applied.failed)
            yield applied
    for half in halves:
        yield from _pieces(op, half, limit)


def _halves(op: Operator, rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Cut rows in two, groups kept whole where the operator looks at them; empty if it cannot."""
    unit = "group_id" if op.sees == "group" and "group_id" in rows.columns else None
    if unit is None:
        half = rows.height // 2
        return [rows[:half], rows[half:]] if half else []
    groups = rows[unit].unique(maintain_order=True)
    first = groups[: len(groups) // 2]
    if not len(first):
        return []
    is_first = pl.col(unit).is_in(first.implode(), nulls_equal=True)
    return [rows.filter(is_first), rows.filter(~is_first)]


def _in_order(made: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Put rows made in pieces in the order that they were given in; new ones stand behind."""
    key = laws.id_column(rows.columns)
    place = pl.DataFrame({key: rows[key], "_place": range(rows.height)})
    both = made.join(place, on=key, how="left", maintain_order="left")
    return both.sort("_place", nulls_last=True, maintain_order=True).drop("_place")


def _fails_without_rows(op: Operator, given: pl.Schema) -> bool:
    try:
        op.columns_after(given)
    except OperatorError:
        return True
    return False


def _errors(produced: pl.DataFrame, key: str) -> pl.DataFrame:
    if ERROR not in produced.columns:
        return pl.DataFrame(schema={key: pl.String, "error": pl.String})
    bad = produced.filter(pl.col(ERROR).is_not_null())
    return bad.select(key, pl.col(ERROR).alias("error"))
