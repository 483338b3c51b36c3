"""Pipeline: a source, operators and a sink; each run leaves its `lineage` and its `drops`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..store import Store
from . import source as sources
from .config import parse
from .executors import Executor, executor_of
from .explain import explained
from .incremental import unseen
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
        """Return the plan in words; with a store, checked against its rows where rows matter.

        A store also tells which rows a run would read, and what earlier runs did and cost.

        Raises what `run` would raise before it reads.
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
        """Read what is new, apply the operators, store what they make, and say what happened.

        With `at` the source is the store as it was at that snapshot. Rows that an earlier run of
        the same pipeline treated are not read again where the operators allow it, but with `full`.
        A value that it derived for a row before, and not any more, is taken back by a NULL.

        Rows go through in parts of bounded bytes; only an operator that sees all rows waits for
        them, with the columns that it reads, while the others lie in temporary files. The order of
        rows is that of the source, those made from others behind them. What each part's rows were
        dropped for, or failed with, is stored before its rows, and last the row of `lineage`, which
        makes the run count. After a kill in between, run it again: ids follow from content, so
        nothing is stored twice.

        Raises OperatorError when an operator breaks its law or fails on a larger share of rows than
        `max_failed`; what parts before it made is stored then, and does not count.
        """
        plan = self.plan()
        chosen = executor_of(self.executor if executor is None else executor)
        past = store.at(at or store.versions())
        self._check_rows(plan, past)
        new = unseen(self, plan, past, full=full, is_past=at is not None)
        return Run(self, plan, store, past, new, executor=chosen, listener=listener).done()

    def _check_rows(self, plan: Plan, store: Store) -> None:
        if any(op.whole_groups for op in plan.operators):
            sources.check_groups(self.source, store)
