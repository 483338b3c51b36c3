"""Pipelines: a source, operators and a sink; each run is recorded in `lineage` and `drops`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..store import Store
from . import source as sources
from .config import parse
from .executors import Executor, executor_of
from .explain import explained
from .incremental import new_rows
from .plan import Plan
from .report import Listener, Report
from .running.run import Run
from .spec import PipelineSpec


@dataclass(frozen=True)
class Pipeline(PipelineSpec):
    """Which operators run, from what source, to what sink.

    A sink of None returns the rows in the report. Operators may be given by name, as in YAML.

    >>> from rlake.pipelines import Table
    >>> Pipeline(name="answered", source=Table("tasks", where="answer IS NOT NULL"), operators=[
    ...     {"keep": {"where": "length(answer) < 3"}}]).run(store).rows.select("answer").rows()
    [('4',)]
    """

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

    def explain(self, store: Store | None = None) -> str:
        """Return the plan as text; with a store, checked against its rows where they matter.

        With a store, it also shows which rows a run would read, and what earlier runs did and cost.

        Raises what `run` raises before it reads rows.
        """
        plan = self.plan()
        if store is None:
            return str(plan)
        self._check_rows(plan, store)
        return str(explained(self, plan, store))

    def run(
        self,
        store: Store,
        *,
        at: str | None = None,
        full: bool = False,
        executor: Executor | str | Mapping[str, Any] | None = None,
        listener: Listener | None = None,
    ) -> Report:
        """Read what is new, apply the operators, store the results, and return a report.

        With `at`, the source is the store as it was at that snapshot. Rows that an earlier run of
        the same pipeline processed are skipped where the operators allow it, unless `full` is set.
        A value that an earlier run derived for a row and this one does not is withdrawn by a NULL.

        Rows are processed in parts of bounded size; only an operator that needs all rows waits for
        them, with the columns that it reads, while other columns are in temporary files. Rows keep
        the order of the source, and new rows follow. The reasons of dropped and failed rows are
        stored before the other rows of their part, and the row of `lineage`, which makes the run
        count, last. After a kill, run it again: ids follow from content, so nothing is stored
        twice.

        Raises OperatorError when an operator breaks an invariant or fails on a larger share of rows
        than `max_failed`; the results of earlier parts are stored then, but do not count.
        """
        plan = self.plan()
        chosen = executor_of(self.executor if executor is None else executor)
        past = store.at(at or store.versions())
        self._check_rows(plan, past)
        new = new_rows(self, plan, past, full=full, is_past=at is not None)
        return Run(self, plan, store, past, new, executor=chosen, listener=listener).done()

    def _check_rows(self, plan: Plan, store: Store) -> None:
        if any(op.whole_groups for op in plan.operators):
            sources.check_groups(self.source, store)
