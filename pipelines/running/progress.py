"""Telling what a run does: counts for its report and its listener, notes of single rows."""

from collections import Counter
from collections.abc import Sequence
from time import monotonic

import polars as pl

from ...operators import Operator
from ...store import Store
from ..report import MOST_REASONS, OTHER, Dropped, Listener, Progress, Step, summed
from .apply_stage import Treated
from .stages import Stage

LEAST_TREATED = 20
"""Rows that an operator has treated before the share on which it failed says something."""
_ERRORS = 64
"""Errors of a part that are looked for before a job stops: each may take many calls to find."""
_NOTES_BYTES = 8 << 20


class RunProgress:
    """Counts what each operator did."""

    def __init__(
        self,
        operators: Sequence[Operator],
        max_failed: float,
        listener: Listener | None,
        num_stages: int,
    ) -> None:
        self._max_failed, self._listener = max_failed, listener
        self._operators = operators
        self.labels = _labels(operators)
        """The operators' names, numbered where one comes again."""
        self._steps = [Step(n, op.kind) for n, op in zip(self.labels, operators, strict=True)]
        self._reasons: list[Counter[str]] = [Counter() for _ in operators]
        self._stage, self._num_stages = 0, num_stages
        self._rows = self._treated = 0
        self._began = monotonic()

    @property
    def steps(self) -> tuple[Step, ...]:
        """What each operator did so far."""
        return tuple(self._steps)

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """How many rows went so far, by operator and reason."""
        message = zip(self.labels, self._reasons, strict=True)
        return tuple(Dropped(label, r, n) for label, found in message for r, n in found.items())

    @property
    def empty(self) -> tuple[str, ...]:
        """Warnings of filters that dropped every row they were given, with the numbers."""
        found = []
        for step, reasons in zip(self._steps, self._reasons, strict=True):
            if step.kind == "filter" and step.rows_in and not step.rows_out:
                each = summed(Dropped(step.operator, r, n) for r, n in reasons.items())
                why = "; ".join(f"{d.rows} for: {d.reason}" for d in each[:3])
                found.append(f"`{step.operator}` dropped all {step.rows_in} rows ({why})")
        return tuple(found)

    def begin(self, stage: int, rows: int) -> None:
        """Begin a stage of so many rows."""
        self._stage, self._rows, self._treated = stage, rows, 0
        self._began = monotonic()

    def add(self, stage: Stage, treated: Treated) -> None:
        """Count what became of a part, and tell the listener."""
        for place, (step, dropped) in enumerate(
            zip(treated.steps, treated.dropped, strict=True), stage.first
        ):
            mine = self._steps[place] + step
            self._steps[place] = mine
            self._count(self._reasons[place], dropped)
        self._treated += treated.num_rows
        if self._listener is not None:
            self._listener(
                Progress(
                    stage=self._stage,
                    stages=self._num_stages,
                    rows=self._rows,
                    treated=self._treated,
                    seconds=monotonic() - self._began,
                    steps=self.steps,
                    dropped=self.dropped,
                )
            )

    def _count(self, known: Counter[str], dropped: pl.DataFrame) -> None:
        if not dropped.height:
            return
        for reason, rows in dropped.group_by("reason", maintain_order=True).len().rows():
            is_one = reason in known or len(known) < MOST_REASONS
            known[reason if is_one else OTHER] += rows

    def most_failed(self, stage: Stage, rows: int) -> int | None:
        """Return on how many rows of a part an operator may raise before the rest is left alone.

        It is more than `check_failed` allows of all rows, so that the errors of some are stored.
        """
        if self._max_failed >= 1 or stage.makes_rows:
            return None
        return max(_ERRORS, int(self._max_failed * rows))

    def check_failed(self, stage: Stage, *, is_end: bool = False) -> None:
        """Raise OperatorError when an operator failed on too large a share of its rows.

        One bad row never stops a job, unless none is allowed.
        """
        for place in range(stage.first, stage.first + len(stage.operators)):
            step = self._steps[place]
            most = max(1, self._max_failed * step.rows_in) if self._max_failed else 0
            if step.failed > most and (is_end or step.rows_in >= LEAST_TREATED):
                raise self._operators[place].error(
                    f"failed on {step.failed} of the {step.rows_in} rows treated so far, more than "
                    f"the share of {self._max_failed:g} that `max_failed` allows; the last error: "
                    f"{step.last_error}"
                )

    def end(self, stage: Stage) -> None:
        """End a stage; raises OperatorError when too large a share of few rows failed."""
        self.check_failed(stage, is_end=True)


class RowLog:
    """Rows of `drops` and `operator_errors`: stored when many, and before those of the sink."""

    def __init__(self, store: Store, lineage_id: str) -> None:
        self._store, self._lineage_id = store, lineage_id
        self._waiting: dict[str, list[pl.DataFrame]] = {}
        self._bytes = 0

    def put(self, table: str, operator: str, rows: pl.DataFrame) -> None:
        """Note rows that an operator dropped, or on which it raised."""
        if not rows.height:
            return
        named = {"operator": pl.lit(operator), "lineage_id": pl.lit(self._lineage_id)}
        self._waiting.setdefault(table, []).append(rows.with_columns(**named))
        self._bytes += int(rows.estimated_size())
        if self._bytes > _NOTES_BYTES:
            self.flush()

    def flush(self) -> None:
        """Store what was noted."""
        for table, rows in self._waiting.items():
            self._store.append(table, pl.concat(rows, how="diagonal"))
        self._waiting, self._bytes = {}, 0


def _labels(operators: Sequence[Operator]) -> tuple[str, ...]:
    seen: Counter[str] = Counter()
    labels = []
    for op in operators:
        seen[op.name] += 1
        labels.append(op.name if seen[op.name] == 1 else f"{op.name} {seen[op.name]}")
    return tuple(labels)
