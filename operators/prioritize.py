"""Priorities: one number a row; larger is drawn more often."""

from .body import Value
from .decorator import operator


@operator("prioritize", writes=("priority",))
def priority(*, expression: str) -> Value:
    """Set `priority` to an SQL expression (DuckDB's dialect) over the row's columns.

    NULL stays NULL: not computed. A value that is negative or not finite is an error.

    >>> import polars as pl
    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "reward": [0.25, None]})
    >>> rows.pipe(priority(expression="1 - reward"))["priority"].to_list()
    [0.75, None]
    """
    return Value(f"({expression})::DOUBLE")
