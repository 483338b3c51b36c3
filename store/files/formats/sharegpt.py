"""ShareGPT: {"conversations": [{"from": "human", "value": ...}], "system", "tools"}, both ways."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ...conversation import calls_of, is_text, text_of
from ...raw_json import Raw, dumps, listed
from .format import Format, Ours, Row, message, others, short, wrong

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Roles of the chat format by the roles of ShareGPT."""


_NAMES = {
    "user": "human",
    "assistant": "gpt",
    "system": "system",
    "tool": "observation",
    "function": "observation",
}
"""Roles of ShareGPT by the roles of the chat format."""


def experiences(row: Row) -> list[Ours]:
    """Give the conversation, with the roles of the chat format."""
    conversation = _conversation(row)
    rest = others(row, ("conversations", "system", "tools", "reward"))
    tools = row.json("tools") if row.get("tools") not in ("", [], None) else None
    reward = row.number("reward")
    return [{"messages": listed(conversation), "tools": tools, "reward": reward, "metadata": rest}]


def _conversation(row: Row) -> list[Raw]:
    turns = row.parsed("conversations")
    if not isinstance(turns, list) or not turns:
        raise wrong(f"`conversations` must be a list of turns, got {short(turns)}")
    system = row.text("system")
    return [*([message("system", system)] if system else []), *map(_message, turns)]


def _message(turn: Any) -> Raw:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise wrong(f'a turn must be {{"from": ..., "value": ...}}, got {short(turn)}')
    who, said = turn.get("from"), turn["value"]
    if who not in ROLES:
        raise wrong(f"a turn is from {who!r}, expected one of {', '.join(ROLES)}")
    if who != "function_call":
        return message(ROLES[who], said)
    try:
        calls = json.loads(said)
    except ValueError:
        raise wrong(f"a `function_call` must be JSON, got {short(said)}") from None
    made = [
        {"type": "function", "function": {"name": c.get("name"), "arguments": _arguments(c)}}
        for c in (calls if isinstance(calls, list) else [calls])
    ]
    return dumps({"role": "assistant", "content": None, "tool_calls": made})


def _arguments(call: dict[str, Any]) -> str:
    """Return the arguments as the chat format has them: JSON text."""
    given = call.get("arguments", {})
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def turns(conversation: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the turns of a conversation, or none when part of it cannot be represented.

    Tool calls become a turn of `function_call`, whose value is JSON: a call, or a list of them.

    >>> turns([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}])
    [{'from': 'human', 'value': 'hi'}, {'from': 'gpt', 'value': 'hello'}]
    """
    made: list[dict[str, str]] = []
    for one in conversation:
        said, calls = text_of(one.get("content")), calls_of(one)
        if one.get("role") not in _NAMES or not (said is not None or calls):
            return []
        if not is_text(one.get("content")):
            return []
        if said is not None and (said or not calls):
            made.append({"from": _NAMES[one["role"]], "value": said})
        if calls:
            each = [_call(c.get("function", c)) for c in calls]
            text = json.dumps(each[0] if len(each) == 1 else each, ensure_ascii=False)
            made.append({"from": "function_call", "value": text})
    return made


def _call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", "{}")
    with suppress(ValueError):  # arguments that a model wrote may be no JSON
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"name": function.get("name"), "arguments": arguments}


SHAREGPT = Format(
    "sharegpt",
    '{"conversations": [{"from": "human", "value": ...}], "system"}',
    needs=(frozenset({"conversations"}),),
    columns=("messages", "tools", "reward", "metadata"),
    rows=experiences,
    has_tasks=True,
)
