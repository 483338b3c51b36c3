"""One run of a pipeline: its stages, partition by partition, and the rows that it stores."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import polars as pl

from ...operators import Operator
from ...operators.invariants import check_ids, id_column
from ...store import Appended, Store
from ...store.errors import OperatorError
from ...store.ids import lineage_id
from ...store.lineage.pipeline_runs import pipeline_run
from ...store.undo import replace
from .. import expectations, writing
from .. import sink as sinks
from .. import source as sources
from ..cache import OperatorCache
from ..executors import Executor
from ..expectation import Expectation
from ..incremental import NewRows, runs_before
from ..plan import Plan
from ..report import Listener, Report, Step
from ..source import TAKEN_BACK, Sql, Table, rows_of, tables_read
from ..spec import PipelineSpec
from ..writing import Before, Maker
from .apply_stage import StageWork, Treated, stepped, widened
from .column_pruning import given_to, needed
from .open_source import opened
from .partition import cut, in_order
from .progress import RowLog, RunProgress
from .spill import Spill, Spilled
from .staged_rows import StagedRows
from .stages import Stage, stages


class Run:
    """A run in progress."""

    def __init__(
        self,
        pipeline: PipelineSpec,
        plan: Plan,
        store: Store,
        past: Store,
        new: NewRows,
        *,
        executor: Executor,
        listener: Listener | None,
    ) -> None:
        self._pipeline, self._plan, self._store, self._past = pipeline, plan, store, past
        self._new, self._executor = new, executor
        self.lineage_id = lineage_id()
        sink = pipeline.sink if isinstance(pipeline.sink, Table) else None
        is_replacing = sink is not None and sink.mode == "replace"
        self._maker = Maker(pipeline.name, self.lineage_id, is_replacing)
        self._began = monotonic()
        self._cache = OperatorCache(store)
        self._stages = stages(plan.operators)
        self._progress = RunProgress(
            plan.operators, pipeline.max_failed, listener, len(self._stages)
        )
        self._log = RowLog(store, self.lineage_id)
        self._rows_in = 0
        self._warnings: list[str] = []

    def done(self) -> Report:
        """Run the pipeline and return its report.

        Drops and errors are stored before the rows of the sink, and lineage last: if a kill leaves
        no row of lineage, the next run reads the same rows again, and ids that are stored already
        are not stored twice.
        """
        writer, done = None, Appended(0, 0, 0)
        with ExitStack() as stack:
            self._check_source(stack)
            if not self._new.is_nothing:
                stack.enter_context(self._executor.running())
                held = self._opened(stack)
                read, before = self._ids_from_store(held), self._before(held)
                for number, stage in enumerate(self._stages[:-1], 1):
                    held = self._between(number, stage, held, stack)
                writer = self._writer(held, read, before)
                stack.callback(writer.close)
                done = self._written(held, writer)
            self._log.flush()
            # before lineage is stored, or this run would be among those that it replaces
            replaced = self._replaced()
            self._store.append("lineage", [self._lineage(done)])
            # after it: a kill in between leaves the rows of both, never of neither
            replace(self._store, replaced, by=self.lineage_id)
        return Report(
            pipeline=self._pipeline.name,
            lineage_id=self.lineage_id,
            rows_in=self._rows_in,
            rows_seen_before=self._new.rows_before,
            rows_out=done.rows,
            already=done.duplicates,
            dropped=self._progress.dropped,
            steps=self._progress.steps,
            warnings=(*self._progress.empty, *self._warnings),
            seconds=monotonic() - self._began,
            rows=writer.rows if isinstance(writer, writing.Collected) else None,
        )

    def _opened(self, stack: ExitStack) -> StagedRows:
        operators, source = self._plan.operators, self._pipeline.source
        given = sources.schema(source)
        columns = needed(given, operators, self._pipeline.sink)
        spill = self._spill(pl.Schema({n: given[n] for n in columns}), stack)
        held = opened(source, self._past, columns, spill, addresses=self._new.addresses)
        if operators:
            check_ids(held.light([id_column(list(held.schema))]), "the source")
        self._rows_in = held.height
        return held

    def _check_source(self, stack: ExitStack) -> None:
        """Check what is expected of all rows of the source; raises JobError if it is not so."""
        expected, source = self._pipeline.expect.get("source", ()), self._pipeline.source
        select = source.select if isinstance(source, Table | Sql) else None
        rows = None
        if expected and select is None:
            given = sources.schema(source)
            spill = self._spill(given, stack)
            rows = opened(source, self._past, list(given), spill, addresses=None).light(list(given))
        self._check("source", expected, rows=rows, select=select)

    def _check(self, side: str, expected: Sequence[Expectation], **rows: Any) -> None:
        what = f"the {'output' if side == 'sink' else side} of pipeline `{self._pipeline.name}`"
        found = expectations.check(
            self._store, expected, what, past=self._past, lineage_id=self.lineage_id, **rows
        )
        self._warnings += expectations.enforce(found, what, stopped="nothing was written")

    def _as_expected(
        self, rows: Iterator[pl.DataFrame], schema: pl.Schema
    ) -> Iterator[pl.DataFrame]:
        """Yield rows only after all of them were checked, so that nothing is half-written."""
        expected = self._pipeline.expect["sink"]
        with closing(Spill(schema, folder=self._executor.folder)) as spill:
            # spilled, since what comes out may not fit into memory
            for part in rows:
                spill.put(part)
            held = StagedRows.all_of(spill.done())
            read = {name for one in expected for name in one.columns(schema)}
            self._check("sink", expected, rows=held.light([n for n in schema if n in read]))
            for places in cut(held.sizes(), part_bytes=self._executor.part_bytes):
                yield held.read(held.part(places))

    def _ids_from_store(self, held: StagedRows) -> pl.Series:
        """Return the ids of rows of `experiences` in the source, if the sink may get them back."""
        sink, source = self._pipeline.sink, self._pipeline.source
        is_read = isinstance(source, Table | Sql) and "experience_id" in held.schema
        if not is_read or not isinstance(sink, Table) or sink.table != "experiences":
            return pl.Series("experience_id", [], pl.String)
        ids = held.light(["experience_id"])["experience_id"]
        if isinstance(source, Table):
            return ids
        stored = rows_of(self._past.sql("SELECT experience_id FROM experiences"))
        return ids.filter(ids.is_in(stored["experience_id"].implode()))

    def _before(self, held: StagedRows) -> Before | None:
        """Return which values of earlier runs are withdrawn unless this run sets them again."""
        sink, now = self._pipeline.sink, self._new
        if not isinstance(sink, Table) or (key := sinks.VALUES.get(sink.table)) is None:
            return None
        if now.definition is None or key not in held.schema:
            return None
        ran = runs_before(self._store, self._pipeline.name).filter(_is_of(sink))
        is_older = pl.lit(now.is_everything)
        if not self._maker.is_replacing:  # else whatever the source was
            is_older &= pl.col("source") == self._plan.source
            # an incremental run of the same definition reads a part of the rows, so the values of
            # its earlier runs still hold
            is_older &= pl.col("pipeline_digest") != now.definition
        ids, left = held.light([key])[key], now.left
        return Before(
            ran["lineage_id"],
            ids if left is None else pl.concat([ids, left]),
            ran.filter(is_older)["lineage_id"],
            every_name=self._maker.is_replacing,
        )

    def _replaced(self) -> list[str]:
        """Return the ids of earlier runs that this one replaces."""
        sink = self._pipeline.sink
        if not self._maker.is_replacing or self._new.is_nothing or sinks.takes_values(sink):
            return []
        assert isinstance(sink, Table), "tables are replaced"
        runs = runs_before(self._store, self._pipeline.name).filter(_is_of(sink))
        return runs["lineage_id"].to_list()

    def _spill(self, schema: pl.Schema, stack: ExitStack) -> Spill:
        executor = self._executor
        spill = Spill(schema, folder=executor.folder, in_files=executor.in_files)
        return stack.enter_context(closing(spill))

    def _writer(self, held: StagedRows, read: pl.Series, before: Before | None) -> writing.Writer:
        return writing.opened(
            self._pipeline.sink,
            self._store,
            self._work(self._stages[-1], held).schema,
            maker=self._maker,
            read=read,
            operators=self._plan.operators,
            before=before,
        )

    def _work(self, stage: Stage, held: StagedRows) -> StageWork:
        return StageWork.of(held, stage.operators, self._progress.most_failed(stage, held.height))

    def _between(self, number: int, stage: Stage, held: StagedRows, stack: ExitStack) -> StagedRows:
        """Run a stage that is not the last one."""
        if stage.sees_all:
            return self._seen_together(number, stage, held, stack)
        work = self._work(stage, held)
        spill = self._spill(work.schema, stack)
        for rows in self._treated(number, stage, work):
            spill.put(rows)
        return StagedRows.all_of(spill.done())

    def _written(self, held: StagedRows, writer: writing.Writer) -> Appended:
        """Run the last stage, and write its rows to the sink."""
        stage = self._stages[-1]
        work = self._work(stage, held)
        parts = self._treated(len(self._stages), stage, work)
        if self._pipeline.expect.get("sink"):
            parts = self._as_expected(parts, work.schema)
        for rows in parts:
            self._log.flush()  # reasons first: a row that is missing can then be explained
            writer.put(rows)
        if self._progress.empty and self._pipeline.on_empty == "error":
            self._log.flush()
            raise OperatorError("; ".join(self._progress.empty))
        return writer.done()

    def _treated(self, number: int, stage: Stage, work: StageWork) -> Iterator[pl.DataFrame]:
        """Yield the rows that come out of a stage, in the order of the source.

        New rows, and rows of parts that overlap (whole groups), are spilled until the stage ends.
        """
        parts = self._parts(stage, work.held)
        follow, height = in_order(parts), work.held.height
        self._progress.begin(number, height)
        with closing(Spill(work.schema, folder=self._executor.folder)) as waiting:
            places = [np.empty(0, np.int64)]
            planned = [work.held.part(p) for p in parts]
            for treated in self._executor.treated(work, planned, self._store, self._cache):
                self._note(stage, treated)
                now_due = int(np.searchsorted(treated.places, height)) if follow else 0
                if now_due:
                    yield treated.rows[:now_due]
                if now_due < treated.rows.height:
                    waiting.put(treated.rows[now_due:])
                    places.append(treated.places[now_due:])
            self._progress.end(stage)
            yield from self._waited(stage, work, waiting.done(), np.concatenate(places))

    def _parts(self, stage: Stage, held: StagedRows) -> list[np.ndarray]:
        groups = None
        if stage.by_group:
            one_group = "group_id" not in held.schema
            groups = pl.Series("group_id", [None] * held.height, pl.String)
            groups = groups if one_group else held.light(["group_id"])["group_id"]
        return cut(held.sizes(), part_bytes=self._executor.part_bytes, groups=groups)

    def _waited(
        self, stage: Stage, work: StageWork, waiting: Spilled, places: np.ndarray
    ) -> Iterator[pl.DataFrame]:
        if not waiting.height:
            return
        if stage.makes_rows:
            key = id_column(list(work.schema))
            made = waiting.light([key]).filter(pl.lit(pl.Series(places >= work.held.height)))
            check_ids(made, " and ".join(f"`{op.name}`" for op in stage.operators))
        order = np.argsort(places, kind="stable")
        sizes = waiting.sizes([])[order]
        for part in cut(sizes, part_bytes=self._executor.part_bytes):
            yield waiting.read(order[part], list(work.schema))

    def _seen_together(
        self, number: int, stage: Stage, held: StagedRows, stack: ExitStack
    ) -> StagedRows:
        """Apply an operator to all rows, with the columns that it reads, and add its columns."""
        [op] = stage.operators
        names = given_to(op, held.schema)
        self._progress.begin(number, held.height)
        if not held.height:
            return StagedRows.all_of(self._spill(op.columns_after(held.schema), stack).done())
        began, rows = perf_counter(), held.light(list(held.schema) if names is None else names)
        applied, cached = self._cache.apply(
            op, rows, max_failed=self._progress.most_failed(stage, held.height)
        )
        self._note(stage, stepped(op, rows, applied, cached, perf_counter() - began))
        self._progress.end(stage)
        if names is None or op.kind == "reshape":
            spill = self._spill(applied.rows.schema, stack)
            spill.put(applied.rows)
            return StagedRows.all_of(spill.done())
        known = widened(op, rows, applied.rows)
        if op.kind == "filter":
            key = id_column(rows.columns)
            held = held.kept(rows[key].is_in(known[key].implode()).to_numpy())
        return held.with_columns(known.select(op.writes)) if op.writes else held

    def _note(self, stage: Stage, treated: Treated) -> None:
        """Log dropped and failed rows; raises OperatorError when too many failed."""
        self._progress.add(stage, treated)
        labels = self._progress.labels[stage.first :]
        for label, dropped, failed in zip(labels, treated.dropped, treated.failed, strict=False):
            self._log.put("drops", label, dropped)
            self._log.put("operator_errors", label, failed)
        try:
            self._progress.check_failed(stage)
        except OperatorError:
            self._log.flush()
            raise

    def _lineage(self, done: Appended) -> dict[str, Any]:
        sink, source = self._pipeline.sink, self._pipeline.source
        made = {sink.table: done.version} if isinstance(sink, Table) and done.version else {}
        read = {*sources.versions_read(source, self._past), *tables_read(source), *TAKEN_BACK}
        steps, operators = self._progress.steps, self._plan.operators
        return pipeline_run(
            self.lineage_id,
            pipeline=self._pipeline.name,
            source=self._plan.source,
            sink=self._plan.sink,
            rows_in=self._rows_in,
            rows_out=done.rows,
            rows_dropped=sum(d.rows for d in self._progress.dropped),
            read={
                n: v
                for n, v in self._past.versions().items()
                if n in read and (v > 1 or n not in TAKEN_BACK)
            },
            written=made,
            operators=[_ran(o, s) for o, s in zip(operators, steps, strict=True)],
            pipeline_digest=self._new.definition,
            rows_failed=sum(s.failed for s in steps),
            costs=[_cost(s) for s in steps],
        )


def _is_of(sink: Table) -> pl.Expr:
    """Return whether a run wrote to the same table."""
    return pl.col("sink").str.strip_suffix(", replaced") == f"table {sink.table}"


def _cost(s: Step) -> dict[str, Any]:
    return {"operator": s.operator, "rows": s.rows_in, "cached": s.cached, "seconds": s.seconds}


def _ran(op: Operator, step: Step) -> dict[str, Any]:
    return {
        "name": op.name,
        "kind": op.kind,
        "params": json.dumps(op.params, ensure_ascii=False),
        "fingerprint": op.fingerprint,
        "rows_in": step.rows_in,
        "rows_out": step.rows_out,
    }
