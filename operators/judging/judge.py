"""A question to a judge, the tries that it is about as text, and its answer read as JSON."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from ...store.records import Experience, Message, Task
from ..answer_extraction import reply
from ..chat_client import Ask, NoAnswerError

T = TypeVar("T")

_LONGEST = 20_000
"""Characters of one text that a judge is shown: its beginning and its end."""


async def answer(ask: Ask, question: str, read: Callable[[Any], T], *, tries: int) -> T:
    """Ask for JSON and read it; what cannot be read is asked for again, with what was wrong.

    `read` raises ValueError for what is not as it was asked for. Raises NoAnswerError after
    `tries` answers of that kind.
    """
    messages: list[Message] = [{"role": "user", "content": question}]
    wrong = ""
    for _ in range(tries):
        text = await ask(messages)
        try:
            return read(_json_in(text))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            wrong = f"{error}, in {text[:200]!r}"
            asked = f"That cannot be read: {error}. Answer again, with the JSON only."
            messages += [
                {"role": "assistant", "content": text[:_LONGEST]},
                {"role": "user", "content": asked},
            ]
    raise NoAnswerError(f"the judge answered {tries} times what cannot be read: {wrong}")


def _json_in(text: str) -> Any:
    """Return the last JSON object or list of a text that may talk around it."""
    text = re.sub(r"^.*</think>", "", text, flags=re.DOTALL)
    found = None
    decoder, start = json.JSONDecoder(), 0
    while (opening := re.compile(r"[{\[]").search(text, start)) is not None:
        try:
            found, start = decoder.raw_decode(text, opening.start())
        except ValueError:
            start = opening.start() + 1
    if found is None:
        raise ValueError("there is no JSON")
    return found


def shown_task(task: Task) -> str:
    """Return a task as a judge sees it: its conversation."""
    return "\n".join(f"[{m.get('role')}] {_cut(str(m.get('content')))}" for m in task.messages)


def shown_try(task: Task, experience: Experience) -> str:
    """Return a try as a judge sees it: all that came after the task's own messages."""
    messages = (experience.messages or ())[len(task.messages) :]
    if len(messages) < 2:
        return _cut(reply(experience))
    return "\n".join(f"[{m.get('role')}] {_cut(json.dumps(_said(m)))}" for m in messages)


def number(value: Any, low: float, high: float) -> float:
    """Return a number within its range; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    if not low <= value <= high:
        raise ValueError(f"{value} is not between {low:g} and {high:g}")
    return float(value)


def listed(answer: Any, name: str, length: int) -> Sequence[Any]:
    """Return the list of an answer; raises ValueError unless it is there, of that length."""
    values = cast(Mapping[str, Any], answer).get(name) if isinstance(answer, Mapping) else answer
    if not isinstance(values, list) or len(cast(list[Any], values)) != length:
        raise ValueError(f"`{name}` must be a list of {length}, got {values!r}")
    return cast(list[Any], values)


def _said(message: Message) -> Any:
    summary = {k: v for k, v in message.items() if k in ("content", "tool_calls") and v}
    return summary.get("content") if list(summary) == ["content"] else summary


def _cut(text: str) -> str:
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}\n[...]\n{text[-half:]}"
