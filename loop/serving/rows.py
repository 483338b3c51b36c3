"""The rows of a session: tasks, one experience per conversation, and feedback."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...store.ids import content_id
from ...store.records import Experience, Task
from ..chat_api.sessions import Session
from ..inference.policy import Turn
from ..trajectories.trajectory import split_trajectories, to_experiences

TASKSET = "served"
SOURCE = "served"


def group_of(session: Session) -> str:
    """Return the group of a session's rows: the one the client named, or one of its own."""
    return f"{SOURCE}/{session.group_id or session.id}"


def row_id(session: Session, number: int) -> str:
    """Return the id of a session's row, a function of its turns alone."""
    return f"{SOURCE}/{session.key}/{number:02d}"


def first_row(key: str) -> str:
    """Return the id of the first row of the session with a key."""
    return f"{SOURCE}/{key}/00"


def experiences(
    session: Session, *, run_id: str, rollout: int
) -> tuple[list[Task], list[Experience]]:
    """Return the tasks and rows of a session.

    Turns whose tokens continue each other are one row. `rollout` is the number of its rollout in
    the group; the answers to a single request are rollouts of their own, with the next numbers.
    """
    runs = _runs(session)
    tasks = _tasks(runs)
    is_once = len(set(session.responses)) == 1
    named = {id(turn): name for turn, name in zip(session.turns, session.responses, strict=True)}
    rows = []
    for i, (task, run) in enumerate(zip(tasks, runs, strict=True)):
        [row] = to_experiences(task, run)
        names = list(dict.fromkeys(named[id(turn)] for turn in run))
        rows.append(
            replace(
                row,
                source=SOURCE,
                run_id=run_id,
                session_id=session.id,
                group_id=group_of(session),
                experience_id=row_id(session, i),
                rollout_index=rollout + (i if is_once else 0),
                metadata={"responses": names},
            )
        )
    return list({task.task_id: task for task in tasks}.values()), rows


def num_rollouts(session: Session) -> int:
    """Return how many rollouts of its group a session is."""
    return len(_runs(session)) if len(set(session.responses)) == 1 else 1


def row_ids(session: Session, response_id: str | None = None) -> list[str]:
    """Return the ids of a session's rows so far, or of those that contain a response."""
    runs = _runs(session)
    if response_id is None:
        return [row_id(session, i) for i in range(len(runs))]
    pairs = zip(session.turns, session.responses, strict=True)
    meant = {id(turn) for turn, name in pairs if name == response_id}
    return [row_id(session, i) for i, run in enumerate(runs) if any(id(t) in meant for t in run)]


def _runs(session: Session) -> list[list[Turn]]:
    """Return the turns of each row, in the order of their first turns.

    A row keeps its number while the session grows, since feedback may name it already. Turns of
    different models are never in one row.
    """
    # by identity: two turns of a session may be equal
    order = {id(turn): i for i, turn in enumerate(session.turns)}
    by_engine: dict[str | None, list[Turn]] = {}
    for turn in session.turns:
        by_engine.setdefault(turn.completion.engine, []).append(turn)
    runs = [run for turns in by_engine.values() for run in split_trajectories(turns)]
    return sorted(runs, key=lambda run: order[id(run[0])])


def feedback_rows(experience_ids: Sequence[str], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of `feedback` for experiences."""
    return [
        {**given, "feedback_id": content_id(given["feedback_id"], name), "experience_id": name}
        for name in experience_ids
    ]


def _tasks(runs: Sequence[Sequence[Turn]]) -> list[Task]:
    """Return the task of each row: the first messages of its conversation.

    A row that continues the conversation of an earlier row in other tokens has the same task.
    """
    found: list[Task] = []
    for run in runs:
        begun = list(run[0].messages)
        same = [t for t in found if begun[: len(t.messages)] == list(t.messages)]
        found.append(same[0] if same else Task(messages=begun, taskset=TASKSET))
    return found
