"""Among which rows a row is compared with others: those of its group, of its task, or all."""

from collections.abc import Iterable, Mapping
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


def places_by_group(groups: Iterable[str | None]) -> list[list[int]]:
    """Return the places of the rows of each group; a row without a group is alone.

    >>> places_by_group(["a", None, "b", "a", None])
    [[0, 3], [1], [2], [4]]
    """
    found: dict[str | int, list[int]] = {}
    for place, group in enumerate(groups):
        found.setdefault(place if group is None else group, []).append(place)
    return list(found.values())
