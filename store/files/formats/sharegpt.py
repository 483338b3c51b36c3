"""ShareGPT: {"conversations": [{"from": "human", "value": ...}], "system", "tools"}."""

import json
from typing import Any

from ..raw_json import Raw, dumps, listed
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
"""Who said it, in our words."""


def experiences(row: Row) -> list[Ours]:
    """Give the conversation, with the roles of the chat format."""
    talk = _talk(row)
    rest = others(row, ("conversations", "system", "tools", "reward"))
    tools = row.json("tools") if row.get("tools") not in ("", [], None) else None
    reward = row.number("reward")
    return [{"messages": listed(talk), "tools": tools, "reward": reward, "metadata": rest}]


def tasks(row: Row) -> list[Ours]:
    """Give what was asked; the last answer is the reference."""
    conversation = _talk(row)
    last = json.loads(conversation[-1])
    if last["role"] != "assistant":
        return [{"messages": listed(conversation)}]
    return [{"messages": listed(conversation[:-1]), "answer": last.get("content")}]


def _talk(row: Row) -> list[Raw]:
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


SHAREGPT = Format(
    "sharegpt",
    '{"conversations": [{"from": "human", "value": ...}], "system"}',
    needs=(frozenset({"conversations"}),),
    columns=("messages", "tools", "reward", "metadata"),
    rows=experiences,
    tasks=tasks,
)
