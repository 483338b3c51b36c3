"""Generators of toy rows: an expert's answers, preferences, and distinct random values.

A function for `data.generator` takes the tasks of `tasks.where` and returns `{table: rows}`. IDs
depend only on its parameters and the tasks, so that a resumed run stores no row twice.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, TypeVar

import numpy as np

from ....operators.statistics import seeded_uniform
from ....store import Experience, Task
from ....store.errors import ConfigError
from ....store.ids import content_id, preference_id
from .sums import answered

MOST_MISSES = 10_000
"""Consecutive draws without a new value after which `different` gives up."""

T = TypeVar("T")


def different(
    draw: Callable[[], tuple[Hashable, T] | None],
    count: int,
    *,
    what: str,
    advice: str,
    patience: int = MOST_MISSES,
) -> Iterator[T]:
    """Yield `count` values with different keys.

    `draw` returns a key with its value, or None for a failed draw. Raises ConfigError after
    `patience` consecutive draws without a new key.

    >>> draws = iter([("a", 1), None, ("a", 2), ("b", 3)])
    >>> list(different(lambda: next(draws), 2, what="letters", advice="ask for fewer"))
    [1, 3]
    """
    seen: set[Hashable] = set()
    missed = 0
    while len(seen) < count:
        if missed == patience:
            raise ConfigError(f"only {len(seen)} of {count} {what} were found; {advice}")
        missed += 1
        drawn = draw()
        if drawn is not None and drawn[0] not in seen:
            missed = 0
            seen.add(drawn[0])
            yield drawn[1]


def expert_answers(
    tasks: Sequence[Task], *, wrong: float = 0.0, answers: int = 1, seed: int = 0
) -> Mapping[str, Sequence[Experience]]:
    """Return an expert's answers as text; with probability `wrong`, the answer to another task.

    Each is a row of `experiences` with source `expert` and the reward `share_right`; the answers to
    a task are a group.

    >>> made = expert_answers([Task.ask("38+45=", "083")], answers=2)
    >>> [(row.response_text, row.reward, row.rollout_index) for row in made["experiences"]]
    [('083', 1.0, 0), ('083', 1.0, 1)]
    """
    said = [task.answer or "" for task in tasks]
    # Wrong answers depend on all tasks, so that other tasks must give other IDs.
    name = f"expert-{content_id(wrong, seed, said, length=8)}" if wrong else "expert"
    made = []
    for task in tasks:
        for i in range(answers):
            lot = seeded_uniform(seed, task.task_id, i)
            other = said[int(lot / wrong * len(said))] if lot < wrong else task.answer or ""
            group = f"{name}/{task.task_id}"
            made.append(answered(task, other, group=group, name=f"{i:02d}", rollout=i))
    return {"experiences": made}


def compared_answers(
    tasks: Sequence[Task], *, wrong: int = 2, seed: int = 0
) -> Mapping[str, Sequence[Any]]:
    """Return the right answer to each task, `wrong` answers to other tasks, and preferences.

    Rows of `experiences` are text with the reward `share_right`; those of a task are a group. Each
    wrong answer is the rejected one of a row of `preferences` with source `compared_answers`.

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
        others.sort(key=lambda answer: seeded_uniform(seed, task.task_id, answer))
        said = [task.answer or "", *others[:wrong]]
        group = f"compared-{seed}/{task.task_id}"
        made = [
            answered(task, text, group=group, name=text, rollout=i, source="synthetic")
            for i, text in enumerate(said)
        ]
        rows += made
        pairs += [_preferred(made[0], worse, source="compared_answers") for worse in made[1:]]
    return {"experiences": rows, "preferences": pairs}


def compared_attempts(
    tasks: Sequence[Task], *, attempts: int = 8, longest: int = 4, seed: int = 0
) -> Mapping[str, Sequence[Any]]:
    """Return the right answer to each task and garbled ones, and preferences between all of them.

    The more characters are right and in place, the better; equally good ones are not compared.

    >>> made = compared_attempts([Task.ask("21=", "12")], attempts=2)
    >>> [(row.response_text, row.reward) for row in made["experiences"]]
    [('12', 1.0), ('', 0.0), ('122', 0.6666666666666666)]
    >>> len(made["preferences"])
    3
    """
    alphabet = sorted({c for task in tasks for c in f"{task.prompt_text}{task.answer}"})
    rows: list[Experience] = []
    pairs: list[dict[str, Any]] = []
    for task in tasks:
        rng = np.random.default_rng([seed, int(task.task_id[:12], 16)])
        said = dict.fromkeys([task.answer or ""])
        for _ in range(attempts):
            noise, length = rng.random(), rng.integers(longest + 1)
            text = [c if rng.random() > noise else rng.choice(alphabet) for c in task.answer or ""]
            said["".join([*text, *rng.choice(alphabet, longest)][:length])] = None
        group = f"attempts-{seed}/{task.task_id}"
        made = [
            answered(task, text, group=group, name=text, rollout=i, source="synthetic")
            for i, text in enumerate(said)
        ]
        rows += made
        pairs += [
            _preferred(better, worse, source="compared_attempts")
            for better, worse in permutations(made, 2)
            if (better.reward or 0.0) > (worse.reward or 0.0)
        ]
    return {"experiences": rows, "preferences": pairs}


def _preferred(better: Experience, worse: Experience, *, source: str) -> dict[str, Any]:
    chosen, rejected = str(better.experience_id), str(worse.experience_id)
    return {
        "preference_id": preference_id(chosen, rejected),
        "task_id": better.task_id,
        "chosen_id": chosen,
        "rejected_id": rejected,
        "margin": (better.reward or 0.0) - (worse.reward or 0.0),
        "source": source,
    }
