"""Store the rows of a group; a row that the table rejects is replaced by one with the reason."""

from collections.abc import Sequence
from typing import Any

from ...store import Store
from ...store.errors import SchemaError
from ...store.records import Experience
from ...store.schema import TABLES
from ...store.validate import conform
from .rewards import LONGEST


def store_rows(store: Store, rows: Sequence[Experience]) -> list[Experience]:
    """Append rows and return them as stored; a row that does not fit is replaced by the reason."""
    try:
        store.append("experiences", rows)
        return list(rows)
    except (SchemaError, TypeError):  # TypeError: messages or metadata are not JSON
        # Checked row by row only now: one bad row must not lose the rollouts stored with it.
        checked = fitting(rows)
    store.append("experiences", checked)
    return checked


def fitting(rows: Sequence[Experience]) -> list[Experience]:
    """Return rows that fit the table; a row that does not is replaced by the reason."""
    return [_fitting(row) for row in rows]


def standing_in(row: Experience, reason: str, **known: Any) -> Experience:
    """Return a replacement for a row that cannot be stored, with its ids and the reason."""
    return Experience(
        task_id=row.task_id,
        group_id=row.group_id,
        experience_id=row.experience_id,
        rollout_index=row.rollout_index,
        run_id=row.run_id,
        batch=row.batch,
        group_index=row.group_index,
        purpose=row.purpose,
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
