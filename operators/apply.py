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
from .body import Body, Explained, describe, produce

Kind = Literal["clean", "derive", "filter", "prioritize", "augment", "reshape"]
"""What an operator may do, by the law that it obeys; see `laws`."""

Frame = TypeVar("Frame", pl.LazyFrame, pl.DataFrame)

KEEP, REASON = "keep", "reason"
"""Columns by which a filter's body may mark every row, instead of leaving rows out."""


@dataclass(frozen=True)
class Applied:
    """What an operator made of rows, and the ids that it dropped, each with a reason."""

    rows: pl.DataFrame
    dropped: pl.DataFrame


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
    body: Body = field(repr=False, compare=False)
    reads: tuple[str, ...]
    """Columns that must be there."""
    reads_rest: bool
    """Whether it may look at other columns too."""
    writes: tuple[str, ...]
    """Columns that it sets or adds."""
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
        """Apply it: lazily to a LazyFrame; at once, with its law checked, to a DataFrame."""
        if isinstance(frame, pl.DataFrame):
            return self.apply(frame).rows
        self.check_columns(frame)
        return self._finish(self._produce(frame), frame)

    def apply(self, rows: pl.DataFrame) -> Applied:
        """Apply it to rows in memory and check the law of its kind.

        Raises OperatorError when the law is broken, a column is missing, or the body fails.
        """
        frame = rows.lazy()
        self.check_columns(frame)
        with self._boundary():
            # the streaming engine adds up in another order each time: other last bits
            produced = self._produce(frame).collect(engine="in-memory")
            laws.check_produced(self, rows, produced)
            made = self._finish(produced.lazy(), frame).collect(engine="in-memory")
            dropped = self._dropped(produced.lazy(), frame).collect(engine="in-memory")
        laws.check(self, rows, made, dropped)
        return Applied(made, dropped.select(laws.id_column(rows.columns), REASON))

    def split(self, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the rows kept, and the rows dropped with the column `reason` beside.

        >>> from rlake.operators import keep
        >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "reward": [1.0, 0.0]})
        >>> keep(where="reward > 0").split(rows)[1].rows()
        [('b', 0.0, 'not true: reward > 0')]
        """
        applied = self.apply(rows)
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
            told = (str(error).splitlines() or [""])[0]
            raise self.error(f"failed with {type(error).__name__}: {told}") from error

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
