"""Reports of pipeline runs, finished (`Report`) and in progress (`Progress`)."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import polars as pl

from ..store.errors import JobError
from ..store.query import literal

if TYPE_CHECKING:
    from ..store import Store

MOST_REASONS = 1_000
"""Reasons that are counted one by one for each operator; a reason may hold a number of the row."""
OTHER = "other reasons, each in `drops`"
_SHOWN = 5
"""Reasons of an operator that a report shows."""
_FEW = 3
"""Reasons that differ only in their numbers and are still listed one by one."""
_NUMBER = re.compile(r"(?<![\w/.-])-?\d+(?:\.\d+)?(?![\w/])")
"""A number by itself, and not a part of an id."""


@dataclass(frozen=True)
class Dropped:
    """The number of rows that an operator dropped for one reason."""

    operator: str
    reason: str
    rows: int


def summed(dropped: Iterable[Dropped]) -> list[Dropped]:
    """Return many reasons that differ in their numbers only as one, the most frequent first.

    >>> summed([Dropped("short", f"length {n} is not above 9", 2) for n in range(4, 8)])
    [Dropped(operator='short', reason='length 4 to 7 is not above 9', rows=8)]
    """
    alike: dict[tuple[str, str], list[Dropped]] = {}
    for one in dropped:
        alike.setdefault((one.operator, _NUMBER.sub("{}", one.reason)), []).append(one)
    found: list[Dropped] = []
    for (operator, _), each in alike.items():
        if len(each) <= _FEW:
            found += each
        else:
            ranged = _ranged([d.reason for d in each])
            found.append(Dropped(operator, ranged, sum(d.rows for d in each)))
    return sorted(found, key=lambda d: -d.rows)


def _ranged(reasons: list[str]) -> str:
    """Return one reason for some that differ in their numbers: from the smallest to the largest."""
    slots = zip(*(_NUMBER.findall(reason) for reason in reasons), strict=True)
    # By value: as text, 10 comes before 9.
    ends = iter([(min(s, key=float), max(s, key=float)) for s in slots])
    return _NUMBER.sub(lambda _: " to ".join(dict.fromkeys(next(ends))), reasons[0])


@dataclass(frozen=True)
class Step:
    """Counts of an operator so far."""

    operator: str
    kind: str
    rows_in: int = 0
    rows_out: int = 0
    failed: int = 0
    """Rows on which it failed, each with its error in `operator_errors`."""
    cached: int = 0
    """Rows whose result was in the cache of costly operators."""
    seconds: float = 0.0
    """Seconds of work, summed over threads."""
    last_error: str | None = None

    def __add__(self, other: "Step") -> "Step":
        """Add the counts of more rows."""
        return Step(
            self.operator,
            self.kind,
            self.rows_in + other.rows_in,
            self.rows_out + other.rows_out,
            self.failed + other.failed,
            self.cached + other.cached,
            self.seconds + other.seconds,
            other.last_error or self.last_error,
        )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run; a listener gets one after each partition."""

    stage: int
    """Operators that treat rows part by part are one stage, one that sees all rows is another."""
    stages: int
    rows: int
    """Rows of this stage."""
    treated: int
    """Of them, rows that went through it."""
    seconds: float
    """Since this stage began."""
    steps: tuple[Step, ...]
    """All operators of the pipeline, in their order."""
    dropped: tuple[Dropped, ...]

    @property
    def rows_per_second(self) -> float:
        """Rows that went through this stage each second."""
        return self.treated / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> int:
        """Rows on which an operator failed."""
        return sum(s.failed for s in self.steps)


Listener = Callable[[Progress], None]
"""Called with the progress of a run."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a pipeline run; also stored in `lineage` and `drops` under `lineage_id`."""

    pipeline: str
    lineage_id: str
    rows_in: int
    """Rows read."""
    rows_seen_before: int = 0
    """Rows of the source that earlier runs processed and this one did not read."""
    rows_out: int
    """Rows written; without a sink, rows returned."""
    already: int
    """Rows that were in the sink already."""
    dropped: tuple[Dropped, ...]
    steps: tuple[Step, ...] = ()
    """What each operator did, and what it cost."""
    warnings: tuple[str, ...] = ()
    seconds: float
    rows: pl.DataFrame | None = field(default=None, repr=False)
    """The rows themselves, for a pipeline without a sink."""

    @property
    def rows_dropped(self) -> int:
        """Rows dropped by all operators, for all reasons."""
        return sum(d.rows for d in self.dropped)

    @property
    def rows_failed(self) -> int:
        """Rows on which an operator failed, each with its error in `operator_errors`."""
        return sum(s.failed for s in self.steps)

    def __str__(self) -> str:
        before = f" ({self.rows_seen_before} seen before)" if self.rows_seen_before else ""
        lines = [
            f"{self.pipeline}: {self.rows_in} rows in{before}, {self.rows_out} out, {self.already} "
            f"there already, {self.rows_dropped} dropped, in {self.seconds:.2f} s"
        ]
        for step in self.steps:
            reasons = summed(d for d in self.dropped if d.operator == step.operator)
            lines += [f"  {d.rows:>6}  {d.operator}: {d.reason}" for d in reasons[:_SHOWN]]
            rest = reasons[_SHOWN:]
            if rest:
                rows = sum(d.rows for d in rest)
                lines.append(f"  {rows:>6}  {step.operator}: {len(rest)} other reasons")
            if step.failed:
                message = f"failed, the last with: {step.last_error}; a full run retries them"
                lines.append(f"  {step.failed:>6}  {step.operator} {message}")
        lines += [f"warning: {w}" for w in self.warnings]
        return "\n".join(lines)


def check_read(report: Report, store: "Store") -> None:
    """Raise JobError when a source is empty, and was in each earlier run of the pipeline.

    A run without new rows is not a failure.
    """
    if report.rows_in or report.rows_seen_before:
        return
    ran = f"pipeline = {literal(report.pipeline)} AND rows_in > 0"
    if store.sql(f"SELECT count(*) FROM lineage WHERE {ran}").fetchall() == [(0,)]:
        raise JobError(
            f"pipeline `{report.pipeline}` did nothing: its source has no rows; look at what "
            "`source` names, and at its `where`"
        )
