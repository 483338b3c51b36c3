"""Pairwise comparison: a judge compares two rollouts, in both orders."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from ...store.records import Experience, Task
from ..chat_client import Ask, JudgeSpec, chat_client
from ..endpoint_replies import NoAnswerError
from ..reward_protocol import Verdict, of_group
from .judge import answer, prompt, shown_rollout


@of_group
async def pairwise(
    task: Task,
    experiences: Sequence[Experience],
    *,
    judge: JudgeSpec,
    opponents: int = 2,
    max_attempts: int = 2,
) -> list[Verdict]:
    """Return each rollout's share of comparisons won in its group, from 0.0 to 1.0; a tie is half.

    Each rollout is compared with the next `opponents` of its group, in a ring, or with all in a
    small group. The judge is asked twice, with the two exchanged: if it prefers a position rather
    than a rollout, that is a tie (position bias, arXiv:2306.05685). A comparison without a valid
    answer is left out and counted in `detail`; a rollout without any comparison gets None.

    >>> import asyncio
    >>> async def first(messages):
    ...     return '{"better": "A"}'
    >>> __import__("sys").modules["judges"] = type("judges", (), {"first": first})
    >>> said = [Experience(task_id="t", response_text=text) for text in ("4", "five")]
    >>> [v.value for v in asyncio.run(pairwise(Task.ask("2+2="), said, judge="judges:first"))]
    [0.5, 0.5]
    """
    ask, shown = chat_client(judge), [shown_rollout(task, one) for one in experiences]
    pairs = _pairs(len(shown), opponents)
    made = await asyncio.gather(
        *(_compare(ask, task, shown[a], shown[b], max_attempts) for a, b in pairs),
        return_exceptions=True,
    )
    won: list[list[float]] = [[] for _ in shown]
    failed: list[list[BaseException]] = [[] for _ in shown]
    for (a, b), share in zip(pairs, made, strict=True):
        if isinstance(share, NoAnswerError):
            failed[a].append(share)
            failed[b].append(share)
        elif isinstance(share, BaseException):
            raise share
        else:
            won[a].append(share)
            won[b].append(1 - share)
    return [_verdict(*both) for both in zip(won, failed, strict=True)]


def _pairs(number: int, opponents: int) -> list[tuple[int, int]]:
    if number <= 2 * opponents + 1:
        return list(combinations(range(number), 2))
    return [(i, (i + step) % number) for i in range(number) for step in range(1, opponents + 1)]


async def _compare(ask: Ask, task: Task, one: str, other: str, max_attempts: int) -> float:
    """Return 1 when the first is better in both orders, 0 when the other is, else a half."""
    forth, back = await asyncio.gather(
        answer(ask, _question(task, one, other), _read, max_attempts=max_attempts),
        answer(ask, _question(task, other, one), _read, max_attempts=max_attempts),
    )
    # the same answer in both orders prefers a place, not a reply: that is a tie
    return {("A", "B"): 1.0, ("B", "A"): 0.0}.get((forth, back), 0.5)


def _question(task: Task, first: str, second: str) -> str:
    replies = (f'<reply name="{n}">\n{r}\n</reply>' for n, r in (("A", first), ("B", second)))
    form = '{"better": "A"}, {"better": "B"} or {"better": "tie"}.'
    return prompt("Which reply is better?", task, *replies, form=form, reference=task.answer)


def _read(said: Any) -> str:
    better = said.get("better") if isinstance(said, Mapping) else None
    if better not in ("A", "B", "tie"):
        raise ValueError(f'`better` must be "A", "B" or "tie", got {said!r}')
    return better


def _verdict(won: list[float], failed: list[BaseException]) -> Verdict:
    if not won:
        why = str(failed[0])[:500] if failed else "it is alone in its group"
        return Verdict(None, why, f"{type(failed[0]).__name__}: {why}" if failed else None)
    without = f"; {len(failed)} without an answer" if failed else ""
    share = sum(won) / len(won)
    return Verdict(share, f"{sum(won):g} of {len(won)} comparisons won{without}")
