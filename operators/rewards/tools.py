"""Rewards for calling tools: the calls that were made against those that were expected."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ...store.records import Experience, Task
from ..reward_protocol import Verdict

_IN_TEXT = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def tool_call_match(
    task: Task, experience: Experience, *, order: Literal["same", "any", "contains"] = "same"
) -> float | Verdict | None:
    """1.0 when the tool calls of a rollout are those expected, by name and arguments; else 0.0.

    The expected calls are `tool_calls` of the task's metadata, or the answer as JSON: a list of
    `{"name", "arguments"}`, also within `{"function": ...}`. Arguments are compared as JSON values:
    the order of keys does not matter and `1` equals `1.0`, but not `"1"` or `true`. With `order`,
    calls must be made in the `same` order, in `any` order, or the calls made must `contains` those
    expected. Calls are read from assistant messages after the task's own, or from `<tool_call>` in
    their text. (Tool-N1, arXiv:2505.00024.)

    >>> task = Task.ask("Weather?", '[{"name": "weather", "arguments": {"city": "Rome"}}]')
    >>> said = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    >>> tool_call_match(task, Experience(task_id="t", response_text=said))
    1.0
    """
    expected = _expected(task)
    if expected is None:
        return None
    wanted = [_as_text(call) for call in expected]
    try:
        made = [_as_text(call) for call in _calls(task, experience)]
    except (ValueError, RecursionError) as error:  # the latter for what nests very deeply
        return Verdict(0.0, f"a tool call is not JSON: {error}")
    missing, extra = Counter(wanted) - Counter(made), Counter(made) - Counter(wanted)
    if missing:
        return Verdict(0.0, f"missing: {next(iter(missing))}")
    if extra and order != "contains":
        return Verdict(0.0, f"not expected: {next(iter(extra))}")
    if order == "same" and made != wanted:
        return Verdict(0.0, "the calls are in another order")
    return 1.0


def _expected(task: Task) -> list[Any] | None:
    calls = (task.metadata or {}).get("tool_calls")
    if calls is None and task.answer is not None:
        try:
            calls = json.loads(task.answer)
        except ValueError:
            return None
    calls = [calls] if isinstance(calls, Mapping) else calls
    return calls if isinstance(calls, list) else None


def _calls(task: Task, experience: Experience) -> Iterable[Any]:
    messages = experience.messages
    if messages is None:
        messages = [{"role": "assistant", "content": experience.response_text}]
    else:
        messages = messages[len(task.messages) :]
    for message in messages:
        if message.get("role") == "assistant":
            yield from message.get("tool_calls") or map(
                json.loads, _IN_TEXT.findall(str(message.get("content") or ""))
            )


def _as_text(call: Any) -> str:
    """Return a call as text that is equal for equal calls."""
    call = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(call, Mapping) or "name" not in call:
        raise ValueError(f"{json.dumps(call)} has no `name`")
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return f"{call['name']}({json.dumps(_plain(arguments), sort_keys=True)})"


def _plain(value: Any) -> Any:
    # JSON writes 1 and 1.0 for one number, and a model may write either.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
