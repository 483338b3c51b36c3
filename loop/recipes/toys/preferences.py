"""Pairs that need no download: a right answer to a task beside wrong ones, for `data.generator`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ....operators.seeded_random import chance
from ....store import Experience, Task
from ....store.ids import preference_id
from .sums import answered


def compared_answers(
    tasks: Sequence[Task], *, wrong: int = 2, seed: int = 0
) -> Mapping[str, Sequence[Any]]:
    """Return the right answer to each task, `wrong` answers to others, and which is better.

    Rows of `experiences` are text, with `share_right` as their reward; those to one task are a
    group. Each wrong answer is a row of `preferences`, whose source is `compared_answers`.

    >>> tasks = [Task.ask("21=", "12"), Task.ask("20=", "02")]
    >>> made = compared_answers(tasks, wrong=1)
    >>> [(row.response_text, row.reward) for row in made["experiences"][:2]]
    [('12', 1.0), ('02', 0.5)]
    >>> made["preferences"][0]["margin"]
    0.5
    """
    answers = sorted({task.answer or "" for task in tasks})
    rows: list[Experience] = []
    pairs: list[dict[str, Any]] = []
    for task in tasks:
        others = [answer for answer in answers if answer != task.answer]
        others.sort(key=lambda answer: chance(seed, task.task_id, answer))
        said = [task.answer or "", *others[:wrong]]
        group = f"compared-{seed}/{task.task_id}"
        made = [
            answered(task, text, group=group, name=text, rollout=i, source="synthetic")
            for i, text in enumerate(said)
        ]
        rows += made
        pairs += [_preferred(made[0], worse) for worse in made[1:]]
    return {"experiences": rows, "preferences": pairs}


def _preferred(better: Experience, worse: Experience) -> dict[str, Any]:
    chosen, rejected = str(better.experience_id), str(worse.experience_id)
    return {
        "preference_id": preference_id(chosen, rejected),
        "task_id": better.task_id,
        "chosen_id": chosen,
        "rejected_id": rejected,
        "margin": (better.reward or 0.0) - (worse.reward or 0.0),
        "source": "compared_answers",
    }
