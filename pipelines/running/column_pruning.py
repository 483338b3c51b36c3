"""Column pruning: the columns that a pipeline's operators and its sink need."""

from collections.abc import Sequence

import polars as pl

from ...operators import Operator
from ...operators.invariants import IDS, id_column
from ...store.errors import OperatorError
from ...store.schema import TABLES
from ..source import File, Table

_GROUP = "group_id"


def needed(
    given: pl.Schema, operators: Sequence[Operator], sink: Table | File | None
) -> tuple[str, ...]:
    """Return the columns of the source that are needed, in its order."""
    wanted = _of_sink(given, operators, sink)
    for op in operators:
        if op.reads_all or _is_wide(op):
            return tuple(given)
        if op.kind == "augment":  # a new row copies all columns of its parent
            return tuple(given)
        wanted |= {*op.reads, *op.may_read, *op.writes, _GROUP}
    if operators:
        wanted |= {id_column(given.names())}
    return tuple(name for name in given if name in wanted)


def given_to(op: Operator, schema: pl.Schema) -> tuple[str, ...] | None:
    """Return the columns that an operator gets, or None when it needs all of them.

    An operator that declares what it reads gets nothing else, so it cannot change other columns.
    """
    if op.reads_all or op.kind == "augment" or _is_wide(op):
        return None
    wanted = {*op.reads, *op.may_read, *op.writes, *IDS, _GROUP, *op.links}
    names = tuple(n for n in schema if n in wanted)
    # An expression may choose columns by type or pattern, and so do something else with fewer.
    narrow, wide = _after(op, schema.to_frame().select(names).schema), _after(op, schema)
    if narrow is None or wide is None:
        return None
    same = all(narrow.get(n) == wide.get(n) for n in (*names, *op.writes))
    return names if same and {*narrow} - {*names} == {*wide} - {*schema} else None


def _of_sink(
    given: pl.Schema, operators: Sequence[Operator], sink: Table | File | None
) -> set[str]:
    if operators and operators[-1].kind == "reshape":
        return set(operators[-1].reads)
    if not isinstance(sink, Table):
        return set(given)
    if sink.table in ("experience_values", "task_values"):
        return {*IDS, *(n for op in operators for n in op.writes)}
    if sink.table == "scores":
        return {"experience_id", "scorer", "scorer_version", "reward", "detail"}
    return set(TABLES[sink.table].names)


def _is_wide(op: Operator) -> bool:
    """Return whether an expression selects columns by a pattern, such as all of them."""
    parts = op.body if isinstance(op.body, Sequence) and not isinstance(op.body, str) else [op.body]
    parts = [getattr(p, "rows", p) for p in parts]
    return any(isinstance(p, pl.Expr) and p.meta.has_multiple_outputs() for p in parts)


def _after(op: Operator, schema: pl.Schema) -> pl.Schema | None:
    try:
        return op.columns_after(schema)
    except OperatorError:
        return None
