"""Rubrics: a judge decides for each criterion whether a rollout meets it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...store.errors import OperatorError
from ...store.records import Experience, Task
from ..chat_client import JudgeSpec, chat_client
from ..reward_protocol import Verdict
from .judge import answer, listed, number, prompt, shown_rollout


async def rubric(
    task: Task,
    experience: Experience,
    *,
    judge: JudgeSpec,
    criteria: list[str | dict[str, Any]] | None = None,
    aggregation: Literal["explicit", "implicit"] = "explicit",
    max_attempts: int = 2,
) -> Verdict | None:
    """Return the weighted share of criteria that a judge finds met, from 0.0 to 1.0.

    The criteria are `rubric` of the task's metadata, else `criteria`: texts, or `{"criterion",
    "weight"}` with a weight above 0; None when there are none. `detail` lists those not met.
    The sum of the weights met over the sum of all is the explicit aggregation of Rubrics as
    Rewards (arXiv:2507.17746, equation 1). With `implicit` (its equation 2) the judge sees the
    weights and rates the reply as a whole from 1 to 10, and the reward is a tenth of that. Raises
    NoAnswerError after `max_attempts` answers of another form.

    >>> import asyncio
    >>> async def strict(messages):
    ...     return '{"met": [true, false]}'
    >>> __import__("sys").modules["judges"] = type("judges", (), {"strict": strict})
    >>> asked = ["names the result", {"criterion": "explains it", "weight": 3}]
    >>> said = Experience(task_id="t", response_text="4")
    >>> asyncio.run(rubric(Task.ask("2+2="), said, judge="judges:strict", criteria=asked))
    Verdict(value=0.25, detail='not met: explains it')
    """
    weighted = _weighted((task.metadata or {}).get("rubric") or criteria or [])
    if not weighted:
        return None
    if aggregation == "implicit":
        return await _rated(task, experience, judge, weighted, max_attempts)
    names = [name for name, _ in weighted]
    numbered = "\n".join(f"{i}. {name}" for i, name in enumerate(names, 1))
    question = prompt(
        f"Does a reply meet these {len(names)} criteria?",
        task,
        f"<reply>\n{shown_rollout(task, experience)}\n</reply>",
        f"<criteria>\n{numbered}\n</criteria>",
        form='{"met": [true, false, ...]}, one for each criterion, in their order.',
        reference=task.answer,
    )

    def read(said: Any) -> list[bool]:
        met = listed(said, "met", len(names))
        if not all(isinstance(one, bool) for one in met):
            raise ValueError(f"`met` must hold true and false only, got {met!r}")
        return list(met)

    met = await answer(chat_client(judge), question, read, max_attempts=max_attempts)
    reached = sum(weight for (_, weight), one in zip(weighted, met, strict=True) if one)
    missed = [name for name, one in zip(names, met, strict=True) if not one]
    detail = f"not met: {'; '.join(missed)}"[:500] if missed else None
    return Verdict(reached / sum(weight for _, weight in weighted), detail)


async def _rated(
    task: Task,
    experience: Experience,
    judge: JudgeSpec,
    weighted: Sequence[tuple[str, float]],
    max_attempts: int,
) -> Verdict:
    """Return a tenth of the judge's rating of the reply as a whole."""
    listed_criteria = "\n".join(f"- (weight {weight:g}) {name}" for name, weight in weighted)
    question = prompt(
        "How well does a reply meet these criteria as a whole, from 1 (not at all) to 10 (fully)?",
        task,
        f"<reply>\n{shown_rollout(task, experience)}\n</reply>",
        f"<criteria>\n{listed_criteria}\n</criteria>",
        form='{"why": "...", "rating": 7}',
        reference=task.answer,
    )

    def read(said: Any) -> Verdict:
        return Verdict(number(said["rating"], 1, 10) / 10, str(said.get("why") or "")[:500] or None)

    return await answer(chat_client(judge), question, read, max_attempts=max_attempts)


def _weighted(criteria: Sequence[Any]) -> list[tuple[str, float]]:
    made = []
    for one in criteria:
        named = {"criterion": one} if isinstance(one, str) else one
        weight = named.get("weight", 1.0) if isinstance(named, Mapping) else None
        if not isinstance(weight, int | float) or weight <= 0 or "criterion" not in named:
            raise OperatorError(
                "a criterion must be a text, or `{criterion, weight}` with a weight above 0, got "
                f"{one!r}"
            )
        made.append((str(named["criterion"]), float(weight)))
    return made
