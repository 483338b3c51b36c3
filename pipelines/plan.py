"""The plan of a pipeline, checked before any work and shown as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from ..operators import Operator
from ..store.errors import OperatorError
from . import expectations
from . import sink as sinks
from . import source as sources
from .expectation import Expectation
from .running.column_pruning import needed
from .source import File, Source, Table

_SEES = {"row": "single rows", "group": "groups", "all": "all rows"}


@dataclass(frozen=True)
class Plan:
    """A checked pipeline."""

    name: str
    source: str
    columns: tuple[str, ...]
    """Columns that are read from a table; empty: all columns of the source."""
    operators: tuple[Operator, ...]
    sink: str
    out: tuple[str, ...]
    """Columns of the rows that the pipeline returns."""
    expected: tuple[str, ...] = ()
    """What is expected of the rows of the source, and of those for the sink."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, *, source: str = "", steps: Sequence[str] = ()) -> list[str]:
        """Return the plan in words, with a line on its source and on each of its steps."""
        read = f"reads only {', '.join(self.columns)}" if self.columns else ""
        lines = [line("pipeline", self.name), line("source", self.source)]
        lines += [line("", note) for note in (read, source) if note]
        for place, op in enumerate(self.operators):
            lines += [line(str(place + 1), f"{op.kind} {op}"), line("", _described(op))]
            lines += [line("", step) for step in steps[place : place + 1]]
        more = f" and {len(self.out) - 8} more" if len(self.out) > 8 else ""
        lines += [line("sink", self.sink), line("", f"{', '.join(self.out[:8])}{more}")]
        return lines + [line("expect", one) for one in self.expected]


def make(
    name: str,
    source: Source,
    operators: Sequence[Operator],
    sink: Table | File | None,
    *,
    expect: Mapping[str, Sequence[Expectation]],
) -> Plan:
    """Check a pipeline from source to sink and return its plan.

    Raises QueryError, OperatorError, ConfigError or InputError for what would fail later.
    """
    given = sources.schema(source)
    check_order(operators)
    out = given
    for op in operators:
        out = op.columns_after(out)
    sinks.check(sink, source, operators, out)
    for key, schema in (("source", given), ("sink", out)):
        expectations.bind(expect.get(key, ()), schema, f"expect.{key}")
    columns = needed(given, operators, sink) if isinstance(source, Table) else ()
    columns = columns if len(columns) < len(given) else ()
    to = "none: the rows are returned" if sink is None else str(sink)
    made = _stored(out, operators, sink)
    expected = [f"{key}: {one} ({one.severity})" for key in expect for one in expect[key]]
    read = sources.describe(source)
    return Plan(name, read, columns, tuple(operators), to, made, tuple(expected))


def _stored(
    out: pl.Schema, operators: Sequence[Operator], sink: Table | File | None
) -> tuple[str, ...]:
    """Return the columns that a sink stores; one for derived values stores these and the id."""
    if not isinstance(sink, Table) or sink.table not in sinks.VALUES:
        return tuple(out)
    wanted = {*(n for op in operators for n in op.writes), sinks.VALUES[sink.table]}
    return tuple(name for name in out if name in wanted)


def check_order(operators: Sequence[Operator]) -> None:
    """Refuse a row filter before an operator of whole groups, and anything after a reshape."""
    row_filter: Operator | None = None
    for place, op in enumerate(operators):
        if op.whole_groups and row_filter is not None:
            raise OperatorError(
                f"`{row_filter.name}` drops single rows before `{op.name}`, which needs whole "
                f"groups; swap them: put `{op.name}` before `{row_filter.name}`"
            )
        if op.kind == "filter" and not op.whole_groups:
            row_filter = row_filter or op
        if op.kind == "reshape" and place < len(operators) - 1:
            raise OperatorError(
                f"`{op.name}` makes rows of another table, so it stands last; put "
                f"`{operators[place + 1].name}` before it"
            )


def line(head: str, text: str) -> str:
    """Return one line of a plan."""
    return f"{head:<11} {text}"


def _described(op: Operator) -> str:
    """Return what an operator reads, writes and depends on, and where it may stand."""
    reads = ", ".join(op.reads) + (" and any other" if op.reads and op.reads_all else "")
    reads += ", and the row's facts" if op.may_read else ""
    parts = [f"reads {reads or 'any column'}"]
    if op.writes:
        parts.append(f"{'makes' if op.kind == 'reshape' else 'writes'} {', '.join(op.writes)}")
    parts.append(f"sees {_SEES[op.scope]}")
    if op.whole_groups:
        parts.append("whole: no row filter before it")
    if op.kind == "reshape":
        parts.append("stands last")
    return "; ".join(parts)
