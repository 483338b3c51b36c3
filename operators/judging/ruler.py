"""RULER: a judge scores all rollouts of a group relative to each other."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...store.records import Experience, Task
from ..chat_client import JudgeSpec, chat_client
from ..reward_protocol import Verdict, of_group
from .judge import answer, listed, number, prompt, shown_rollout

_RULES = (
    "An attempt that reaches the goal scores much higher than one that does not; of two that do, "
    "the more direct one scores slightly higher; an attempt with some progress may score something."
)


@of_group
async def ruler(
    task: Task,
    experiences: Sequence[Experience],
    *,
    judge: JudgeSpec,
    rules: str = _RULES,
    max_attempts: int = 2,
) -> list[Verdict]:
    """Score the rollouts of a group from 0.0 to 1.0, by a judge that compares them in one request.

    Scores are comparable within a group only, which is enough for a group's advantages. Raises
    NoAnswerError, for the whole group, after `max_attempts` answers without a score between 0 and 1
    for each rollout. (Relative universal LLM-elicited rewards, of OpenPipe's ART.)

    >>> import asyncio
    >>> said = [Experience(task_id="t", response_text=text) for text in ("4", "five")]
    >>> async def kind(messages):
    ...     return '{"scores": [{"score": 1, "why": "right"}, {"score": 0.1, "why": "wrong"}]}'
    >>> __import__("sys").modules["judges"] = type("judges", (), {"kind": kind})
    >>> asyncio.run(ruler(Task.ask("2+2="), said, judge="judges:kind"))[0]
    Verdict(value=1.0, detail='right')
    """
    question, read = compared(task, experiences, rules), partial(scores, count=len(experiences))
    return await answer(chat_client(judge), question, read, max_attempts=max_attempts)


def compared(task: Task, experiences: Sequence[Experience], rules: str = _RULES) -> str:
    """Return the prompt for a judge of a whole group."""
    shown = (
        f"<attempt number={i}>\n{shown_rollout(task, one)}\n</attempt>"
        for i, one in enumerate(experiences, 1)
    )
    count = len(experiences)
    form = (
        '{"scores": [{"why": "a few words", "score": 0.5}, ...]}, one for each of the '
        f"{count} attempts, in their order, each score from 0 to 1."
    )
    question = f"Score {count} attempts at one task relative to each other."
    return prompt(question, task, *shown, rules, form=form)


def scores(said: Any, count: int) -> list[Verdict]:
    """Parse the judge's answer; raises ValueError unless it has a score for each rollout."""
    return [_score(one) for one in listed(said, "scores", count)]


def _score(one: Any) -> Verdict:
    if not isinstance(one, Mapping):
        return Verdict(number(one, 0, 1))
    return Verdict(number(one["score"], 0, 1), str(one.get("why") or "")[:500] or None)
