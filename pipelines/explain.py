"""Explain a pipeline against a store: rows to read, rows expected, and costs so far."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import repeat
from typing import Any

import polars as pl

from ..operators import Operator
from ..store import Store
from ..store.errors import counted
from . import source as sources
from .cache import OperatorCache
from .incremental import new_rows, num_rows
from .plan import Plan, line
from .source import Table
from .spec import PipelineSpec

_ADDS = ("augment", "reshape")
"""Kinds of which more rows may come out than go in."""


@dataclass(frozen=True)
class Step:
    """What is known of an operator before it runs, from earlier runs."""

    operator: str
    kind: str
    reads: tuple[str, ...]
    reads_all: bool
    writes: tuple[str, ...]
    scope: str
    rows_in: int | None
    """Rows expected; None if unknown."""
    most_in: int | None
    """The largest possible number of rows; None if unknown."""
    rows_out: int | None
    is_exact: bool
    """Whether `rows_out` follows from the kinds; else it is estimated from earlier runs."""
    rows_before: int
    """Rows that it processed in all runs so far."""
    seconds_before: float
    cached: int
    """Results in its cache."""

    def __str__(self) -> str:
        out = _number(self.rows_out, None if self.kind in _ADDS else self.most_in)
        about = "" if self.is_exact or self.rows_out is None else "about "
        message = f"{_number(self.rows_in, self.most_in)} rows in, {about}{out} out"
        if self.rows_before and self.seconds_before:
            rate = self.rows_before / self.seconds_before
            message += f"; so far {self.rows_before:,} rows in {self.seconds_before:.2f} s"
            message += f" ({rate:,.0f} rows/s)"
        if self.cached:
            message += f"; {counted(self.cached, 'answer')} known"
        return message


@dataclass(frozen=True)
class Explanation:
    """A plan with what a store adds to it; as text, what `explain` prints."""

    plan: Plan
    rows: int | None
    """Rows of the source; None if it would have to be read to count them."""
    to_read: int | None
    """Rows that a run would read now; None if they are not counted."""
    why: str
    """Why it would read them."""
    steps: tuple[Step, ...]
    runs: int
    """Runs with this definition so far."""
    seconds: float
    last_at: datetime | None
    last: str

    def __str__(self) -> str:
        source = "" if self.rows is None else f"{self.rows:,} rows"
        ran = f"{counted(self.runs, 'run')}, {self.seconds:.2f} s"
        so_far = f"{ran}; {self.last}" if self.last_at else "no run"
        lines = self.plan.lines(source=source, steps=[str(step) for step in self.steps])
        return "\n".join([*lines, line("now", f"a run reads {self.why}"), line("so far", so_far)])


def explained(pipeline: PipelineSpec, plan: Plan, store: Store) -> Explanation:
    """Return what a pipeline would do in a store now, and what it did so far.

    Rows expected of a filter, an augment or a reshape are the share of earlier runs of this
    definition, else of any run that had the same operator with the same parameters.
    """
    now = new_rows(pipeline, plan, store)
    rows = num_rows(pipeline.source, store) if isinstance(pipeline.source, Table) else None
    to_read = rows if now.addresses is None else len(now.addresses)
    runs = _runs(store, [op.fingerprint for op in plan.operators], now.definition)
    mine = [run for run in runs if run["pipeline_digest"] == now.definition]
    last = max(mine, key=lambda run: run["created_at"], default=None)
    return Explanation(
        plan,
        rows,
        to_read,
        now.why,
        tuple(_steps(pipeline, plan, store, runs, mine, to_read)),
        len(mine),
        sum(cost["seconds"] or 0.0 for run in mine for cost in run["costs"] or ()),
        last["created_at"] if last else None,
        _last(last) if last else "",
    )


def _steps(
    pipeline: PipelineSpec,
    plan: Plan,
    store: Store,
    runs: list[dict[str, Any]],
    mine: list[dict[str, Any]],
    rows: int | None,
) -> Iterable[Step]:
    cache, given = OperatorCache(store), sources.schema(pipeline.source)
    most, is_exact = rows, True
    for op in plan.operators:
        done = _Done.of(op, mine)
        done = done if done.rows_in else _Done.of(op, runs)
        out, follows = _expected(op, rows, done)
        is_exact = is_exact and follows
        yield Step(
            op.name,
            op.kind,
            op.reads,
            op.reads_all,
            op.writes,
            op.scope,
            rows,
            most,
            out,
            is_exact,
            done.treated,
            done.seconds,
            cache.count(op, given),
        )
        rows, given = out, op.columns_after(given)
        most = None if op.kind in _ADDS else most


@dataclass(frozen=True)
class _Done:
    rows_in: int
    rows_out: int
    treated: int
    seconds: float

    @classmethod
    def of(cls, op: Operator, runs: Iterable[Mapping[str, Any]]) -> "_Done":
        none = {"rows": 0, "cached": 0, "seconds": 0.0}
        steps = [
            (step, cost)
            for run in runs
            for step, cost in zip(run["operators"], run["costs"] or repeat(none), strict=False)
            if step["fingerprint"] == op.fingerprint
        ]
        return cls(
            sum(step["rows_in"] for step, _ in steps),
            sum(step["rows_out"] for step, _ in steps),
            sum(cost["rows"] - (cost["cached"] or 0) for _, cost in steps),
            sum(cost["seconds"] or 0.0 for _, cost in steps),
        )


def _expected(op: Operator, rows: int | None, done: _Done) -> tuple[int | None, bool]:
    """Return how many rows come out, and whether that is certain."""
    if op.kind in ("clean", "derive", "prioritize") or rows == 0:
        return rows, True
    if rows is None or not done.rows_in:
        return None, False
    return round(rows * done.rows_out / done.rows_in), False


def _runs(store: Store, fingerprints: list[str], definition: str | None) -> list[dict[str, Any]]:
    """Return the runs with this definition, and those that had some of the operators."""
    names = ["lineage_id", "operators", "costs", "pipeline_digest", "rows_in", "rows_out"]
    names += ["rows_dropped", "rows_failed", "created_at"]
    rows = store.scan("lineage").select(names).collect()
    had = pl.col("operators").list.eval(
        pl.element().struct.field("fingerprint").is_in(fingerprints)
    )
    is_mine = (pl.col("pipeline_digest") == definition).fill_null(value=False)
    return rows.filter(is_mine | had.list.any()).to_dicts()


def _last(run: Mapping[str, Any]) -> str:
    failed = f", {run['rows_failed']:,} failed" if run["rows_failed"] else ""
    return (
        f"the last at {run['created_at']:%Y-%m-%d %H:%M:%S}: {run['rows_in']:,} rows in, "
        f"{run['rows_out']:,} out, {run['rows_dropped']:,} dropped{failed}"
    )


def _number(rows: int | None, most: int | None) -> str:
    """Return a number of rows, or what is known of it."""
    if rows is not None:
        return f"{rows:,}"
    return "unknown" if most is None else f"at most {most:,}"
