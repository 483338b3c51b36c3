"""Rows that need no download: functions of tasks for `data.generator`, each of which names its
tables.

Such a function is given the tasks of `tasks.where` and returns `{table: rows}`. Its ids depend on
its parameters and the tasks only, so that rows are stored once however often a run begins.
"""

from collections.abc import Mapping, Sequence

from ....operators.seeded_random import chance
from ....store import Experience, Task
from ....store.ids import content_id
from .frozen_lake import walks
from .preferences import compared_answers
from .sums import answered

__all__ = ["compared_answers", "expert_answers", "walks"]


def expert_answers(
    tasks: Sequence[Task], *, wrong: float = 0.0, answers: int = 1, seed: int = 0
) -> Mapping[str, Sequence[Experience]]:
    """Return an expert's answers, as text; with probability `wrong` each is that to another task.

    Each is a row of `experiences` with source `expert` and `share_right` as its reward; those to
    one task are a group.

    >>> made = expert_answers([Task.ask("38+45=", "083")], answers=2)
    >>> [(row.response_text, row.reward, row.rollout) for row in made["experiences"]]
    [('083', 1.0, 0), ('083', 1.0, 1)]
    """
    said = [task.answer or "" for task in tasks]
    # which wrong answers there are depends on all tasks, so that others are other rows
    name = f"expert-{content_id(wrong, seed, said, length=8)}" if wrong else "expert"
    made = []
    for task in tasks:
        for i in range(answers):
            lot = chance(seed, task.task_id, i)
            other = said[int(lot / wrong * len(said))] if lot < wrong else task.answer or ""
            group = f"{name}/{task.task_id}"
            made.append(answered(task, other, group=group, name=f"{i:02d}", rollout=i))
    return {"experiences": made}
