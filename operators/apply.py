"""Operators: a function of rows with its parameters, checked against the invariants of its kind."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import polars as pl

from ..store.errors import QueryError, RlakeError, nearest
from ..store.ids import content_id
from . import invariants, row_failures
from .body import ERROR, PLACE, Explained, PlainBody, describe, produce
from .kinds import KEEP, REASON, Applied, OperatorSpec
from .row_failures import RowsFailed
from .user_errors import one_line

Frame = TypeVar("Frame", pl.LazyFrame, pl.DataFrame)


_OF_TASKS = ("answer", "task_messages", "task_metadata")
_JOIN = (
    "; join the tasks in the source: `SELECT e.*, t.answer, t.messages AS task_messages, "
    "t.metadata AS task_metadata FROM experiences e JOIN tasks t USING (task_id)`"
)


@dataclass(frozen=True, kw_only=True)
class Operator(OperatorSpec):
    """A function of rows with its parameters: `rows.pipe(operator)` works with any frame."""

    params: Mapping[str, Any]
    """All parameters, including defaults, as they are recorded."""
    path: str
    """Where its function is imported from, as `module:function`."""
    version: int
    """Increased when its results change."""
    body: PlainBody = field(repr=False, compare=False)
    reads: tuple[str, ...]
    """Columns that must exist."""
    reads_all: bool
    """Whether it may read other columns too."""
    may_read: tuple[str, ...] = ()
    """Columns that it reads where they exist."""
    forgives: bool = False
    """Whether rows on which it failed still get values, which say so."""
    code: tuple[str, ...] = ()
    """Digests of users' source code: its function, or one that a parameter names.

    Built-in operators have a `version` instead.
    """

    @cached_property
    def fingerprint(self) -> str:
        """Hash of function, version and parameters."""
        # scope, columns and the like follow from these; ids of new rows and versions of stored
        # values are made of it, so anything more here would give them all new ones
        return content_id(self.path, self.version, dict(self.params), *self.code)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.params.items())})"

    # A type variable, not @overload: typing keeps overloads alive, and with them DuckDB's objects,
    # until after the interpreter has begun to shut down.
    def __call__(self, frame: Frame) -> Frame:
        """Apply it: lazily to a LazyFrame; eagerly, with its invariants checked, to a DataFrame.

        Raises OperatorError when it fails on any row; `apply` continues with the other rows.
        """
        if isinstance(frame, pl.DataFrame):
            return self.apply(frame, max_failed=None if self.forgives else 0).rows
        self.check_columns(frame)
        produced = self._produce(frame)
        schema = produced.collect_schema()
        if ERROR in schema:
            checked = produced.map_batches(self._none_failed, schema=schema)
            produced = (produced if self.forgives else checked).drop(ERROR)
        return self._finish(produced, frame, frame)

    def apply(self, rows: pl.DataFrame, *, max_failed: int | None = None) -> Applied:
        """Apply it to rows in memory and check the invariants of its kind.

        A row on which it raises is listed in `failed` with the error: columns that the operator
        sets are NULL there (a clean leaves them unchanged), and a filter drops the row. If the
        operator needs groups, all rows of the group fail; if it needs all rows, it raises.

        Raises OperatorError when an invariant is broken, a column is missing, the body fails even
        without rows, or more than `max_failed` rows fail.
        """
        self.check_columns(rows.lazy())
        return row_failures.apply(self, rows, max_failed)

    def apply_once(self, rows: pl.DataFrame, *, among: pl.DataFrame | None = None) -> Applied:
        """Apply it to rows in one piece; raises RowsFailed when the body raises.

        `among` are all rows, if these are a part of them.
        """
        frame, key = rows.lazy(), invariants.id_column(rows.columns)
        with self._boundary():
            # The streaming engine adds up in a different order each time, which changes the last
            # bits of sums; a resumed run must get the same numbers.
            produced = self._produce(frame).collect(engine="in-memory")
        failed = _errors(produced, rows[key])
        produced = self._explained(produced, rows) if failed.height else produced
        produced = produced.drop(ERROR, strict=False)
        invariants.check_produced(self, rows, produced)
        with self._boundary():
            all_rows = frame if among is None else among.lazy()
            made = self._finish(produced.lazy(), frame, all_rows).collect(engine="in-memory")
            dropped = self._dropped(produced.lazy(), frame).collect(engine="in-memory")
        invariants.check(self, rows, made, dropped)
        return Applied(made, _with_errors(dropped.select(key, REASON), failed), failed)

    def split(self, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the rows that are kept, and the dropped rows with a column `reason`.

        >>> from rlake.operators import keep
        >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "reward": [1.0, 0.0]})
        >>> keep(where="reward > 0").split(rows)[1].rows()
        [('b', 0.0, 'not true: reward > 0')]
        """
        applied = self.apply(rows, max_failed=0)
        key = invariants.id_column(rows.columns)
        return applied.rows, rows.join(applied.dropped, on=key, how="inner", maintain_order="left")

    def columns_after(self, given: pl.Schema) -> pl.Schema:
        """Return the columns that rows with the columns `given` have afterwards.

        Raises OperatorError when a column is missing, or the body does not fit the columns.
        """
        frame = given.to_frame().lazy()
        with self._boundary():
            return self(frame).collect_schema()

    def check_columns(self, frame: pl.LazyFrame) -> None:
        """Raise OperatorError when a column that it reads does not exist."""
        names = frame.collect_schema().names()
        invariants.id_column(names, self)
        for name in (KEEP, REASON) if self.kind == "filter" else ():
            if name in names:
                raise self.error(f"a filter marks rows in a column `{name}` of its own; rename it")
        for name in self.reads:
            if name not in names:
                hint = _JOIN if name in _OF_TASKS else nearest(name, names)
                raise self.error(f"reads column `{name}`, which is not there{hint}")

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        """Name this operator in any error of its body, which may be a user's code."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RlakeError) and not isinstance(error, QueryError):
                raise
            message = str(self.error(f"failed with {one_line(error)}"))
            raise RowsFailed(message, one_line(error)) from error

    def _none_failed(self, produced: pl.DataFrame) -> pl.DataFrame:
        errors = _errors(produced, produced[invariants.id_column(produced.columns)])
        row_failures.FailureLimit(self, produced.height, 0).count(errors)
        return produced

    def _explained(self, produced: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
        """Set the outcome of rows whose error the body returned: dropped, unchanged or left out."""
        failed = pl.col(ERROR).is_not_null()
        if self.kind in ("augment", "reshape"):
            return produced.filter(~failed)
        if self.kind == "filter":
            kept = pl.col(KEEP) if KEEP in produced.columns else pl.lit(True)  # noqa: FBT003
            reason = [ERROR, REASON] if REASON in produced.columns else [ERROR]
            return produced.with_columns(
                (kept & ~failed).alias(KEEP), pl.coalesce(reason).alias(REASON)
            )
        old = [n for n in self.writes if self.kind == "clean" and n in rows.columns]
        return produced.with_columns(
            pl.when(failed).then(pl.lit(rows[n])).otherwise(n).alias(n) for n in old
        )

    def _produce(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        into = KEEP if self.kind == "filter" else self.writes[0] if len(self.writes) == 1 else None
        made = produce(self.body, frame, into=into)
        if not isinstance(made, pl.LazyFrame):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise self.error(f"its body returned a {type(made).__name__}, expected a LazyFrame")
        if isinstance(self.body, str) and self.kind not in ("augment", "reshape"):
            return _in_order(made, frame)
        return made

    def _finish(
        self, produced: pl.LazyFrame, frame: pl.LazyFrame, among: pl.LazyFrame
    ) -> pl.LazyFrame:
        if self.kind == "filter":
            kept = self._marked(produced, frame).filter(KEEP)
            return kept.drop(KEEP, REASON)
        if self.kind == "augment":
            new = self._named(produced, frame, among)
            return pl.concat([frame, new], how="diagonal_relaxed")
        return produced

    def _dropped(self, produced: pl.LazyFrame, frame: pl.LazyFrame) -> pl.LazyFrame:
        key = invariants.id_column(frame.collect_schema().names())
        if self.kind == "filter":
            return self._marked(produced, frame).filter(~pl.col(KEEP)).select(key, REASON)
        if self.kind == "reshape":
            used = pl.concat([produced.select(pl.col(c).alias(key)) for c in self.links])
            # computed over all rows, since a reason may depend on the group
            reasons = self._with_reasons(frame).select(key, REASON)
            return reasons.join(used, on=key, how="anti", maintain_order="left")
        return frame.select(key, pl.lit("").alias(REASON)).head(0)

    def _marked(self, produced: pl.LazyFrame, frame: pl.LazyFrame) -> pl.LazyFrame:
        """Return all rows with the columns `keep` and `reason`, for every form of body."""
        before, names = frame.collect_schema().names(), produced.collect_schema().names()
        key = invariants.id_column(before)
        if KEEP in names and KEEP not in before:
            kind = produced.collect_schema()[KEEP]
            if kind != pl.Boolean:
                raise self.error(f"its condition is {kind}, expected true or false")
            marked = produced
        else:
            kept = produced.select(key, *self.writes).with_columns(pl.lit(True).alias(KEEP))  # noqa: FBT003
            marked = frame.drop(self.writes, strict=False)
            marked = marked.join(kept, on=key, how="left", maintain_order="left")
        own, has_reason = self._reason().alias(REASON), {KEEP, REASON} <= {*names} - {*before}
        return marked.with_columns(
            pl.col(KEEP).fill_null(value=False), pl.coalesce(REASON, own) if has_reason else own
        )

    def _with_reasons(self, frame: pl.LazyFrame) -> pl.LazyFrame:
        given = self.body.reason if isinstance(self.body, Explained) else None
        return given(frame) if callable(given) else frame.with_columns(self._reason().alias(REASON))

    def _reason(self) -> pl.Expr:
        given = self.body.reason if isinstance(self.body, Explained) else None
        if isinstance(given, pl.Expr):
            return given
        return pl.lit(given or f"keep is false: {describe(self.body)}")

    def _named(
        self, produced: pl.LazyFrame, frame: pl.LazyFrame, among: pl.LazyFrame
    ) -> pl.LazyFrame:
        """Give new rows an id derived from their parent's, a group of their own, and no run.

        The id does not depend on chance, so a row that an earlier call made is recognized and left
        out.
        """
        names, given_types = produced.collect_schema().names(), frame.collect_schema()
        key = invariants.id_column(given_types.names())
        place = pl.int_range(pl.len()).over("parent_id")
        again = pl.when(place > 0).then(pl.format(".{}", place)).otherwise(pl.lit(""))
        fresh = pl.format(
            "{}/{}-{}{}", "parent_id", pl.lit(self.name), pl.lit(self.fingerprint[:8]), again
        )
        given = pl.col(key) if key in names else pl.lit(None, pl.String)
        known = among.select(pl.col(key).alias("_id"), pl.lit(True).alias("_known"))  # noqa: FBT003
        named = (
            produced.with_columns(_id=fresh)
            .join(known, on="_id", how="left", maintain_order="left")
            .filter(given.is_not_null() | pl.col("_known").is_null())
            .with_columns(pl.coalesce(given, "_id").alias(key))
            .drop("_id", "_known")
        )
        if "group_id" in names:
            named = named.with_columns(pl.coalesce("group_id", key).alias("group_id"))
        of_a_run = [n for n in invariants.OF_A_RUN if n in given_types]
        return named.with_columns(pl.lit(None, given_types[n]).alias(n) for n in of_a_run)


def _in_order(made: pl.LazyFrame, frame: pl.LazyFrame) -> pl.LazyFrame:
    """Sort rows that an SQL query returned into the order of the given rows."""
    key, names = invariants.id_column(frame.collect_schema().names()), made.collect_schema().names()
    if key not in names:
        return made
    place = frame.select(key).with_row_index(PLACE)
    placed = made.join(place, on=key, how="left", maintain_order="left")
    return placed.sort(PLACE, nulls_last=True, maintain_order=True).select(names)


def _with_errors(dropped: pl.DataFrame, failed: pl.DataFrame) -> pl.DataFrame:
    """Use the error of a failed row as the reason why it was dropped."""
    if failed.is_empty():
        return dropped
    [key, _] = dropped.columns
    both = dropped.join(failed, on=key, how="left", maintain_order="left")
    return both.select(key, pl.coalesce("error", REASON).alias(REASON))


def _errors(produced: pl.DataFrame, ids: pl.Series) -> pl.DataFrame:
    """Return the ids and errors of failed rows; `ids` are in the order of the rows produced."""
    errors = produced.get_column(ERROR, default=pl.Series([], dtype=pl.String)).alias("error")
    if len(errors) not in (0, len(ids)):  # an augment returns only new rows, each with its parent
        ids = produced["parent_id"].alias(ids.name)
    return pl.DataFrame([ids if len(errors) else ids.clear(), errors]).drop_nulls("error")
