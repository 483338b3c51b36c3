"""Rows of a group as they are stored: rewarded, checked, complete though a rollout failed."""

from collections.abc import Sequence
from typing import Any

from ...store import Store
from ...store.errors import SchemaError
from ...store.records import Experience
from ...store.schema import TABLES
from ...store.validate import conform
from .rewards import LONGEST


def store_rows(store: Store, rows: Sequence[Experience]) -> list[Experience]:
    """Append the rows of tries; return them as stored: one that does not fit says why instead."""
    try:
        store.append("experiences", rows)
        return list(rows)
    except (SchemaError, TypeError):  # a TypeError: messages or metadata that are no JSON
        those = fitting(rows)
    store.append("experiences", those)
    return those


def fitting(rows: Sequence[Experience]) -> list[Experience]:
    """Return rows that the table takes: one that does not fit says why instead."""
    return [_fitting(row) for row in rows]


def standing_in(row: Experience, reason: str, **known: Any) -> Experience:
    """Return a row in place of one that cannot be stored: its names, and why it is not there."""
    return Experience(
        task_id=row.task_id,
        group_id=row.group_id,
        experience_id=row.experience_id,
        rollout=row.rollout,
        run_id=row.run_id,
        step=row.step,
        finish_reason="error",
        drop_reason=reason[:LONGEST],
        num_turns=0,
        **known,
    )


def _fitting(row: Experience) -> Experience:
    try:
        conform(TABLES["experiences"], [row])
        return row
    except (SchemaError, TypeError) as error:
        return standing_in(row, f"the workflow's row does not fit: {error}")
