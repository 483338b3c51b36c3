"""Pipeline: a source, operators and a sink; each run leaves its `lineage` and its `drops`."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Self

import polars as pl

from ..operators import Operator, resolve
from ..operators.laws import check_ids
from ..operators.names import Spec
from ..store import Appended, Store
from ..store.records import now
from . import plan as plans
from . import sink as sinks
from . import source as sources
from .config import parse
from .plan import Plan
from .report import Dropped, Report
from .source import File, Source, Sql, Table


@dataclass(frozen=True)
class Pipeline:
    """Which operators run, from what source, to what sink.

    A sink of None returns the rows in the report. Operators may be given by name, as in YAML.

    >>> Pipeline(name="answered", source=Table("tasks", where="answer IS NOT NULL"), operators=[
    ...     {"keep": {"where": "length(answer) < 3"}}]).run(store).rows.select("answer").rows()
    [('4',)]
    """

    name: str
    source: Source
    operators: Sequence[Operator | Spec] = ()
    sink: Table | File | None = None

    @classmethod
    def from_yaml(cls, text: str | Path) -> Self:
        """Read a pipeline from YAML: the path of a file, or the text itself.

        >>> pipeline = Pipeline.from_yaml('''
        ... name: right_and_wrong
        ... source: {table: experiences, where: "source = 'imported'"}
        ... operators: [drop_flat_groups, {pairs: {strategy: max_min}}]
        ... sink: {table: preferences}
        ... ''')
        >>> pipeline.run(store).rows_out
        0

        Raises ConfigError for unknown keys or values, InputError for a file that cannot be read.
        """
        return cls(**parse(text))

    def plan(self) -> Plan:
        """Check everything that can be checked before any work, and return what will be done."""
        return plans.make(self.name, self.source, [resolve(o) for o in self.operators], self.sink)

    def explain(self, store: Store | None = None) -> str:
        """Return the plan in words; with a store, checked against its rows where rows matter.

        Raises what `run` would raise before it reads.
        """
        plan = self.plan()
        if store is not None:
            self._check_rows(plan, store)
        return str(plan)

    def run(self, store: Store, *, at: str | None = None) -> Report:
        """Read, apply the operators, store the rows in one commit, and say what happened.

        With `at` the source is the store as it was at that snapshot.

        First come the rows' reasons in `drops`, then the sink, and last the row of `lineage`, which
        makes the run count. After a kill in between, run it again: ids follow from content, so
        nothing is stored twice.
        """
        started = monotonic()
        plan = self.plan()
        past = store.at(at or store.versions())
        self._check_rows(plan, past)
        rows = sources.read(self.source, past, columns=plan.columns)
        run = _Run(self, plan, store, past, rows)
        return run.finish(started)

    def _check_rows(self, plan: Plan, store: Store) -> None:
        if any(op.whole_groups for op in plan.operators):
            sources.check_groups(self.source, store)


class _Run:
    """One run under way."""

    def __init__(
        self, pipeline: Pipeline, plan: Plan, store: Store, past: Store, rows: pl.DataFrame
    ) -> None:
        self._pipeline, self._plan, self._store, self._past = pipeline, plan, store, past
        self.lineage_id = f"{now():%Y%m%dT%H%M%S%f}-{secrets.token_hex(4)}"
        self._rows_in = rows.height
        self._steps: list[dict[str, Any]] = []
        self._drops: list[pl.DataFrame] = []
        self._read = self._ids_from_store(rows)
        if plan.operators:
            check_ids(rows, "the source")
        self._rows = self._apply(rows)

    def _ids_from_store(self, rows: pl.DataFrame) -> pl.Series:
        """Return the ids of rows that the source read from `experiences`."""
        empty = pl.Series("experience_id", [], pl.String)
        if (
            not isinstance(self._pipeline.source, Table | Sql)
            or "experience_id" not in rows.columns
        ):
            return empty
        if isinstance(self._pipeline.source, Table):
            return rows["experience_id"]
        stored = sources.rows_of(self._past.sql("SELECT experience_id FROM experiences"))
        return rows["experience_id"].filter(
            rows["experience_id"].is_in(stored["experience_id"].implode())
        )

    def _apply(self, rows: pl.DataFrame) -> pl.DataFrame:
        for op in self._plan.operators:
            applied = op.apply(rows)
            self._steps.append(
                {
                    "name": op.name,
                    "kind": op.kind,
                    "params": json.dumps(op.params, ensure_ascii=False),
                    "fingerprint": op.fingerprint,
                    "rows_in": rows.height,
                    "rows_out": applied.rows.height,
                }
            )
            self._drops.append(applied.dropped.with_columns(pl.lit(op.name).alias("operator")))
            rows = applied.rows
        return rows

    def finish(self, started: float) -> Report:
        """Write drops, sink and lineage, in this order."""
        drops = pl.concat(self._drops) if self._drops else pl.DataFrame()
        if drops.height:
            self._store.append(
                "drops", drops.with_columns(pl.lit(self.lineage_id).alias("lineage_id"))
            )
        sink = self._pipeline.sink
        done = Appended(self._rows.height, 0, 0)
        if sink is not None:
            done = sinks.write(
                sink,
                self._rows,
                self._store,
                self._pipeline.name,
                self._read,
                operators=self._plan.operators,
                lineage_id=self.lineage_id,
            )
        self._store.append("lineage", [self._lineage(done, drops.height)])
        return Report(
            pipeline=self._pipeline.name,
            lineage_id=self.lineage_id,
            rows_in=self._rows_in,
            rows_out=done.rows,
            already=done.already,
            dropped=Dropped.counted(drops),
            seconds=monotonic() - started,
            rows=self._rows if sink is None else None,
        )

    def _lineage(self, done: Appended, dropped: int) -> dict[str, Any]:
        sink, source = self._pipeline.sink, self._pipeline.source
        made = {sink.table: done.version} if isinstance(sink, Table) else {}
        read = sources.versions_read(source, self._past)
        return {
            "lineage_id": self.lineage_id,
            "pipeline": self._pipeline.name,
            "source": self._plan.source,
            "sink": self._plan.sink,
            "operators": self._steps,
            "source_versions": [{"name": n, "version": v} for n, v in read.items()],
            "sink_versions": [{"name": n, "version": v} for n, v in made.items()],
            "rows_in": self._rows_in,
            "rows_out": done.rows,
            "rows_dropped": dropped,
        }
