"""What a pipeline will do, checked before any work and shown so that a person can check it."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..operators import Operator
from ..store.errors import OperatorError
from ..store.schema import TABLES
from . import sink as sinks
from . import source as sources
from .source import File, Source, Table


@dataclass(frozen=True)
class Plan:
    """A pipeline that was found sound."""

    name: str
    source: str
    columns: tuple[str, ...]
    """Columns that are read of a table; empty: all that the source has."""
    operators: tuple[Operator, ...]
    sink: str
    out: tuple[str, ...]
    """Columns of the rows that come out."""

    def __str__(self) -> str:
        read = f"\n            reads only {', '.join(self.columns)}" if self.columns else ""
        lines = [f"pipeline    {self.name}", f"source      {self.source}{read}"]
        for place, op in enumerate(self.operators, 1):
            lines += [f"{place:<11} {op.kind} {op}", f"            {_told(op)}"]
        more = f" and {len(self.out) - 8} more" if len(self.out) > 8 else ""
        lines += [f"sink        {self.sink}", f"            {', '.join(self.out[:8])}{more}"]
        return "\n".join(lines)


def make(
    name: str, source: Source, operators: Sequence[Operator], sink: Table | File | None
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
    columns = _columns(source, operators, sink)
    kept = out.names() if not columns or sink is not None else columns
    told = "none: the rows are returned" if sink is None else str(sink)
    return Plan(name, sources.describe(source), columns, tuple(operators), told, tuple(kept))


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


def _columns(
    source: Source, operators: Sequence[Operator], sink: Table | File | None
) -> tuple[str, ...]:
    """Return the columns of `experiences` that are enough, or none when all are needed."""
    if not isinstance(source, Table) or source.table != "experiences":
        return ()
    if not isinstance(sink, Table) or sink.table != "preferences":
        return ()
    if any(op.reads_rest for op in operators):
        return ()
    read = {"experience_id", "group_id"}.union(*(op.reads for op in operators))
    names = [*TABLES["experiences"].names, *(c.alias for c in source.side)]
    return tuple(c for c in dict.fromkeys(names) if c in read)


def _told(op: Operator) -> str:
    reads = ", ".join(op.reads) + (" and any other" if op.reads and op.reads_rest else "")
    parts = [f"reads {reads or 'any column'}"]
    if op.writes:
        parts.append(f"{'makes' if op.kind == 'reshape' else 'writes'} {', '.join(op.writes)}")
    if op.whole_groups:
        parts.append("whole groups")
    return "; ".join(parts)
