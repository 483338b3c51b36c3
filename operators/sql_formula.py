"""SQL formulas over a row, in which `rewards['format']` is the entry of that name."""

import re

from ..store.errors import OperatorError, QueryError
from ..store.query import syntax

NAMED = ("metrics", "rewards")
"""Columns that are lists of names with values, which a formula reads by name."""


def by_name(formula: str, *, what: str) -> str:
    """Return an SQL expression in which lists of named values are read as maps.

    An entry that is not there is NULL. Where entries are read, no window function can be.

    >>> by_name("reward + 1", what="formula")
    '(reward + 1\\n)'

    Raises OperatorError, which names the parameter `what`, when the formula does not parse.
    """
    try:
        syntax(f"SELECT ({formula}\n)", what=f"`{what}` {formula!r}")
    except QueryError as error:
        raise OperatorError(str(error)) from error
    sql = f"({formula}\n)"
    for name in NAMED:
        if re.search(rf"\b{name}\s*\[\s*'", formula):
            # the parameter of the function hides the column of the same name
            sql = f"list_transform([map_from_entries({name})], lambda {name}: {sql})[1]"
    return sql
