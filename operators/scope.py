"""Infer what the result of an operator for a row depends on: the row, its group, or all rows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import polars as pl

from ..store.query import nodes, syntax
from .body import Batches, Explained, PlainBody, Rows, Value

Sees = Literal["row", "group", "all"]
"""What the result for a row depends on: that row alone, its group, or all rows."""

_WIDER = frozenset({"WINDOW", "SUBQUERY"})
"""Classes of SQL expressions that look at other rows."""


def sees_of(body: PlainBody) -> Sees:
    """Return what a body depends on; `all` when that cannot be inferred.

    >>> sees_of(pl.col("reward") > 0), sees_of(pl.col("reward") - pl.col("reward").mean())
    ('row', 'all')
    """
    match body:
        case Explained(rows=rows, reason=reason):
            tells_more = isinstance(reason, pl.Expr) and not _is_by_row(reason)
            return "all" if tells_more else sees_of(rows)
        case Batches(by_group=by_group):
            return "group" if by_group else "row"
        case Rows():
            return "row"
        case Value(sql=sql):
            tree = syntax(f"SELECT ({sql}\n)", what="the expression")
            return "all" if any(n.get("class") in _WIDER for n in nodes(tree)) else "row"
        case pl.Expr():
            return "row" if _is_by_row(body) else "all"
        case str():
            return "all"
        case Sequence():
            return "row" if all(_is_by_row(e) for e in body) else "all"
        case _:
            return "all"


def _is_by_row(expression: pl.Expr) -> bool:
    try:
        # Polars answers for the outermost operation only: in `x - x.mean()` the aggregate is
        # found by asking for each part as well
        is_by_row = expression.meta.is_row_separable()
    except pl.exceptions.PolarsError:  # it cannot answer for Python functions and lists
        return False
    return is_by_row and all(_is_by_row(part) for part in expression.meta.pop())


Within = Literal["group", "task", "all"]
"""Whose rows are compared."""


Unit = Literal["group", "task"]
"""Those of `Within` that have a column."""


UNIT: Mapping[str, str] = {"group": "group_id", "task": "task_id"}
"""The column that identifies a unit; `all` has none."""


def seen(within: Within) -> Literal["group", "all"]:
    """Return the scope of an operator that compares rows within a unit.

    A task may have several groups, so comparing within a task needs all rows.

    >>> seen("group"), seen("task")
    ('group', 'all')
    """
    return "group" if within == "group" else "all"


def places_by_group(groups: Iterable[str | None]) -> list[list[int]]:
    """Return the indices of the rows of each group; a row without a group is its own group.

    >>> places_by_group(["a", None, "b", "a", None])
    [[0, 3], [1], [2], [4]]
    """
    found: dict[str | int, list[int]] = {}
    for place, group in enumerate(groups):
        found.setdefault(place if group is None else group, []).append(place)
    return list(found.values())
