"""Rewards: functions `(task, experience) -> float | None`; None means that it does not apply."""

from collections.abc import Callable

from ..store.records import Experience, Task
from .answers import number_in, reply

Reward = Callable[[Task, Experience], float | None]
"""A reward function: live in the explorer, later over stored rows."""


def exact_match(task: Task, experience: Experience) -> float | None:
    """1.0 when the last reply is the reference answer, ignoring surrounding space, else 0.0.

    >>> exact_match(Task.ask("2+2=", "4"), Experience(task_id="t", response_text=" 4\\n"))
    1.0
    """
    if task.answer is None:
        return None
    return float(reply(experience).strip() == task.answer.strip())


def numeric_answer(task: Task, experience: Experience) -> float | None:
    """1.0 when the last reply gives the reference number, else 0.0; None when there is none.

    The number stands after the last `####` or a line's `A:`, as in GSM8K (arXiv:2110.14168);
    without a mark, it is the last number of the text. `1,234`, `$72`,
    `72.0` and `72.` are read as numbers. `50%` is 50: the sign may be left out.

    >>> task = Task.ask("How many clips?", "48/2 = 24, 48+24 = 72\\n#### 72")
    >>> numeric_answer(task, Experience(task_id="t", response_text="It makes $72.00 in all."))
    1.0
    """
    expected = None if task.answer is None else number_in(task.answer)
    if expected is None:
        return None
    return float(number_in(reply(experience)) == expected)
