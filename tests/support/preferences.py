"""Stored pairs that tests share: `from support.preferences import prefer`."""

from itertools import pairwise
from typing import Any

from support.tiny_models import written

from rlake.store import Store
from rlake.store.ids import preference_id


def preference(chosen: str, rejected: str, **columns: Any) -> dict[str, Any]:
    row = {
        "preference_id": preference_id(chosen, rejected),
        "task_id": "t",
        "chosen_id": chosen,
        "rejected_id": rejected,
        "margin": 1.0,
        "source": "pipeline",
    }
    return row | columns


def prefer(store: Store, n: int = 6, **columns: Any) -> list[str]:
    """Store n pairs of n + 1 rows: each row is chosen over the one before it."""
    rows = written(n + 1, response=[2 + i % 4 for i in range(n + 1)], **columns)
    store.append("experiences", rows)
    ids = [str(row.experience_id) for row in rows]
    made = [preference(b, a, margin=float(i)) for i, (a, b) in enumerate(pairwise(ids))]
    store.append("preferences", made)
    return [row["preference_id"] for row in made]
