"""Among which rows a row is compared with others: those of its group, of its task, or all."""

from collections.abc import Mapping
from typing import Literal

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
