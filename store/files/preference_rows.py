"""Preferences: pairs of experiences that are stored, or that come in one row of a file."""

from typing import Any

import pyarrow as pa

from ..ids import content_id
from ..schema import TABLES
from ..store import Store
from .defaults import look_up
from .select_columns import RowError, values_of, with_column

TEXT, REAL = pa.string(), pa.float64()


def fill_preferences(rows: pa.Table, store: Store) -> pa.Table:
    """Fill in the id, and task and margin from the two experiences, which must be stored."""
    chosen, rejected = values_of(rows, "chosen_id"), values_of(rows, "rejected_id")
    wanted = {i for i in (*chosen, *rejected) if i is not None}
    stored = look_up(store, "experiences", "experience_id", wanted, ["task_id", "reward"])
    ids, tasks = values_of(rows, "preference_id"), values_of(rows, "task_id")
    margins = values_of(rows, "margin")
    sources = [s or "imported" for s in values_of(rows, "source")]
    for i, (better, worse) in enumerate(zip(chosen, rejected, strict=True)):
        if better is not None and better == worse:
            raise RowError(i, f"`chosen_id` and `rejected_id` are both {better!r}")
        good, bad = (
            _member(stored, better, "chosen_id", i),
            _member(stored, worse, "rejected_id", i),
        )
        tasks[i] = good["task_id"] if tasks[i] is None else tasks[i]
        if {good["task_id"], bad["task_id"]} != {tasks[i]}:
            raise RowError(i, f"{better!r} and {worse!r} are not two tries at task {tasks[i]!r}")
        if margins[i] is None and None not in (good["reward"], bad["reward"]):
            margins[i] = good["reward"] - bad["reward"]
        ids[i] = content_id(better, worse, sources[i]) if ids[i] is None else ids[i]
    for name, values, kind in (
        ("preference_id", ids, TEXT),
        ("task_id", tasks, TEXT),
        ("margin", margins, REAL),
        ("source", sources, TEXT),
    ):
        rows = with_column(rows, name, values, kind)
    return rows


def of_pairs(rows: pa.Table, margins: list[float | None]) -> pa.Table:
    """Return one preference for each two experiences, of which the first is the better one.

    The margin is the one told, else the difference of their rewards where both have one.
    """
    ids, rewards = values_of(rows, "experience_id"), values_of(rows, "reward")
    tasks = values_of(rows, "task_id")
    made = []
    for i in range(0, rows.num_rows, 2):
        margin = margins[i]
        if margin is None and None not in rewards[i : i + 2]:
            margin = rewards[i] - rewards[i + 1]
        made.append(
            {
                "preference_id": content_id(ids[i], ids[i + 1], "imported"),
                "task_id": tasks[i],
                "chosen_id": ids[i],
                "rejected_id": ids[i + 1],
                "margin": margin,
                "source": "imported",
            }
        )
    return pa.Table.from_pylist(made, _PREFERENCE)


_PREFERENCE = pa.schema(
    [(c.name, c.type) for c in TABLES["preferences"].columns if c.name != "created_at"]
)


def _member(
    stored: dict[str, dict[str, Any]], experience_id: str | None, column: str, place: int
) -> dict[str, Any]:
    if experience_id is None:
        raise RowError(
            place, f"column `{column}` is missing; a pair needs `chosen_id` and `rejected_id`"
        )
    if experience_id not in stored:
        raise RowError(place, f"`{column}` {experience_id!r} is not stored; import that first")
    return stored[experience_id]
