"""Conversations in ShareGPT's words: who said it, and what."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ...conversation import calls_of, is_text, text_of

_NAMES = {
    "user": "human",
    "assistant": "gpt",
    "system": "system",
    "tool": "observation",
    "function": "observation",
}

Turn = dict[str, str]


def turns(talk: Sequence[dict[str, Any]]) -> list[Turn]:
    """Return the turns of a conversation; none when something in it has no such form.

    Tool calls become a turn of `function_call`, whose value is JSON: a call, or a list of them.

    >>> turns([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}])
    [{'from': 'human', 'value': 'hi'}, {'from': 'gpt', 'value': 'hello'}]
    """
    made: list[Turn] = []
    for message in talk:
        said, calls = text_of(message.get("content")), calls_of(message)
        if message.get("role") not in _NAMES or not (said is not None or calls):
            return []
        if not is_text(message.get("content")):
            return []
        if said is not None and (said or not calls):
            made.append({"from": _NAMES[message["role"]], "value": said})
        if calls:
            made.append({"from": "function_call", "value": _calls(calls)})
    return made


def _calls(calls: Sequence[dict[str, Any]]) -> str:
    made = [_call(c.get("function", c)) for c in calls]
    return json.dumps(made[0] if len(made) == 1 else made, ensure_ascii=False)


def _call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", "{}")
    with suppress(ValueError):  # arguments that a model wrote may be no JSON
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"name": function.get("name"), "arguments": arguments}
