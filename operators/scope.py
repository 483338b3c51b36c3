"""What an operator looks at to treat a row, as far as its body tells."""

from collections.abc import Sequence
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
