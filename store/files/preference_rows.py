"""Preferences: pairs of stored experiences, or pairs that come in one row of a file.

The same two experiences are one pair, whoever compared them, as for pipelines: a pair that is
stored already keeps its margin and source, so it is trained on once.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ..ids import preference_id
from ..schema import TABLES
from ..store import Store
from .defaults import look_up
from .select_columns import RowError, values_of, with_column

_KINDS = {c.name: c.type for c in TABLES["preferences"].columns}
_FILLED = ("preference_id", "task_id", "margin", "source")


def fill_preferences(rows: pa.Table, store: Store) -> pa.Table:
    """Fill in the id, and task and margin from the two experiences, which must be stored."""
    chosen, rejected = values_of(rows, "chosen_id"), values_of(rows, "rejected_id")
    wanted = {i for i in (*chosen, *rejected) if i is not None}
    stored = look_up(store, "experiences", "experience_id", wanted, ["task_id", "reward"])
    made: dict[str, list[Any]] = {name: values_of(rows, name) for name in _FILLED}
    tasks, margins = made["task_id"], made["margin"]
    for i, (better, worse) in enumerate(zip(chosen, rejected, strict=True)):
        if better is not None and better == worse:
            raise RowError(i, f"`chosen_id` and `rejected_id` are both {better!r}")
        good = _member(stored, better, "chosen_id", i)
        bad = _member(stored, worse, "rejected_id", i)
        tasks[i] = good["task_id"] if tasks[i] is None else tasks[i]
        if {good["task_id"], bad["task_id"]} != {tasks[i]}:
            raise RowError(i, f"{better!r} and {worse!r} are not two rollouts of task {tasks[i]!r}")
        margins[i] = _margin(margins[i], good["reward"], bad["reward"])
    made["source"] = [source or "imported" for source in made["source"]]
    _name(made, chosen, rejected, store)
    for name in _FILLED:
        rows = with_column(rows, name, made[name], _KINDS[name])
    return rows


def of_pairs(rows: pa.Table, margins: Sequence[float | None], store: Store) -> pa.Table:
    """Return one preference for each two experiences, of which the first is the better one.

    The margin is the given one, else the difference of their rewards where both have one.
    """
    ids, rewards = values_of(rows, "experience_id"), values_of(rows, "reward")
    chosen, rejected = ids[::2], ids[1::2]
    made: dict[str, list[Any]] = {
        "preference_id": [None] * len(chosen),
        "task_id": values_of(rows, "task_id")[::2],
        "chosen_id": chosen,
        "rejected_id": rejected,
        "margin": list(map(_margin, margins[::2], rewards[::2], rewards[1::2])),
        "source": ["imported"] * len(chosen),
    }
    _name(made, chosen, rejected, store)
    return pa.table(made, pa.schema([(name, _KINDS[name]) for name in made]))


def _name(
    made: dict[str, list[Any]], chosen: Sequence[str], rejected: Sequence[str], store: Store
) -> None:
    """Fill in the ids that a file leaves out, and what is stored of such pairs already."""
    ids = made["preference_id"]
    unnamed = [i for i, own in enumerate(ids) if own is None]
    for i in unnamed:
        ids[i] = preference_id(chosen[i], rejected[i])
    # only under ids of ours: an id from the file with other content stays a conflict
    wanted = {ids[i] for i in unnamed}
    known = look_up(store, "preferences", "preference_id", wanted, ["margin", "source"])
    for i in unnamed:
        for name, value in known.get(ids[i], {}).items():
            made[name][i] = value


def _margin(given: float | None, better: float | None, worse: float | None) -> float | None:
    # a missing reward is not zero: without both, the margin stays unknown
    return better - worse if given is None and better is not None and worse is not None else given


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
