"""Progress of a run: counts for its report and listener, and a log of single rows."""

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
"""Rows that an operator must have processed before its share of failures can stop the run."""
_ERRORS = 64
"""Errors of a partition that are isolated before a run stops; each may take many calls to find."""
_NOTES_BYTES = 8 << 20


class RunProgress:
    """Counts the rows that each operator processed, dropped and failed on."""

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
        """The operators' names, numbered where one is used again."""
        self._steps = [Step(n, op.kind) for n, op in zip(self.labels, operators, strict=True)]
        self._reasons: list[Counter[str]] = [Counter() for _ in operators]
        self._stage, self._num_stages = 0, num_stages
        self._rows = self._treated = 0
        self._began = monotonic()

    @property
    def steps(self) -> tuple[Step, ...]:
        """The counts of each operator so far."""
        return tuple(self._steps)

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """Rows dropped so far, by operator and reason."""
        message = zip(self.labels, self._reasons, strict=True)
        return tuple(Dropped(label, r, n) for label, found in message for r, n in found.items())

    @property
    def empty(self) -> tuple[str, ...]:
        """Warnings about filters that dropped all of their rows, with counts by reason."""
        found = []
        for step, reasons in zip(self._steps, self._reasons, strict=True):
            if step.kind == "filter" and step.rows_in and not step.rows_out:
                each = summed(Dropped(step.operator, r, n) for r, n in reasons.items())
                why = "; ".join(f"{d.rows} for: {d.reason}" for d in each[:3])
                found.append(f"`{step.operator}` dropped all {step.rows_in} rows ({why})")
        return tuple(found)

    def begin(self, stage: int, rows: int) -> None:
        """Begin a stage with `rows` rows."""
        self._stage, self._rows, self._treated = stage, rows, 0
        self._began = monotonic()

    def add(self, stage: Stage, treated: Treated) -> None:
        """Count the outcome of a partition, and call the listener."""
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
        """Return the number of failures in a partition after which its other rows are skipped.

        It exceeds what `check_failed` allows for all rows, so that some errors are stored before
        the run stops.
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
    """Rows for `drops` and `operator_errors`, buffered; stored before the rows of the sink."""

    def __init__(self, store: Store, lineage_id: str) -> None:
        self._store, self._lineage_id = store, lineage_id
        self._waiting: dict[str, list[pl.DataFrame]] = {}
        self._bytes = 0

    def put(self, table: str, operator: str, rows: pl.DataFrame) -> None:
        """Log rows that an operator dropped, or on which it failed."""
        if not rows.height:
            return
        named = {"operator": pl.lit(operator), "lineage_id": pl.lit(self._lineage_id)}
        self._waiting.setdefault(table, []).append(rows.with_columns(**named))
        self._bytes += int(rows.estimated_size())
        if self._bytes > _NOTES_BYTES:
            self.flush()

    def flush(self) -> None:
        """Store the buffered rows."""
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
