"""What an operator looks at to treat a row, as far as its body tells."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import polars as pl

from ..store.query import nodes, syntax
from .body import Batches, Explained, PlainBody, Rows, Value

Sees = Literal["row", "group", "all"]
"""What an operator looks at to treat a row: that row alone, its group, or all rows."""

_WIDER = frozenset({"WINDOW", "SUBQUERY"})
"""Classes of SQL expressions that look at other rows."""


def sees_of(body: PlainBody) -> Sees:
    """Return what a body looks at; `all` when it does not tell.

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
        # asked of the whole, it does not tell of an aggregate within, as in `x - x.mean()`
        is_by_row = expression.meta.is_row_separable()
    except pl.exceptions.PolarsError:  # of Python functions and of lists it does not tell
        return False
    return is_by_row and all(_is_by_row(part) for part in expression.meta.pop())


Within = Literal["group", "task", "all"]
"""Whose rows are compared."""


Unit = Literal["group", "task"]
"""Of these, those that have a column."""


UNIT: Mapping[str, str] = {"group": "group_id", "task": "task_id"}
"""The column whose values tell whose rows they are; of all rows there is none."""


def seen(within: Within) -> Literal["group", "all"]:
    """Return what an operator looks at that compares rows so: a task may have several groups.

    >>> seen("group"), seen("task")
    ('group', 'all')
    """
    return "group" if within == "group" else "all"


def places_by_group(groups: Iterable[str | None]) -> list[list[int]]:
    """Return the places of the rows of each group; a row without a group is alone.

    >>> places_by_group(["a", None, "b", "a", None])
    [[0, 3], [1], [2], [4]]
    """
    found: dict[str | int, list[int]] = {}
    for place, group in enumerate(groups):
        found.setdefault(place if group is None else group, []).append(place)
    return list(found.values())
