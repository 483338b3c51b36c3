"""Repair of conversations, so that chat templates accept their messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from .body import Declared, Rows
from .decorator import operator

_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""Names of roles in other formats, and ours."""


@operator("clean")
def repair_messages(*, column: str = "messages") -> Declared:
    """Bring message lists into the form that chat templates accept.

    Roles and keys of other formats (`human`, `gpt`, `from`, `value`) are renamed, NULL and numbers
    as content become text, empty messages are removed, system messages become one at the start, and
    consecutive messages of the same role are joined with an empty line between. Tool calls and
    their results are never joined. A row fails if its text is not a JSON list of messages, or a
    role is missing or unknown. Text that needs no repair is unchanged, to the byte.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "messages": [
    ...     '[{"from": "human", "value": "2+2"}, {"from": "system", "value": "Add."}]']})
    >>> rows.pipe(repair_messages())["messages"][0]
    '[{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}]'
    """

    def repair(row: Mapping[str, Any]) -> dict[str, str | None]:
        text = row[column]
        if text is None:
            return {column: None}
        given = json.loads(text)
        made = repaired(given)
        return {column: text if made == given else json.dumps(made, ensure_ascii=False)}

    return Declared(body=Rows(repair, columns={column: pl.String}), reads=(column,))


def repaired(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates accept; see `repair_messages`.

    >>> repaired([{"role": "user", "content": "2"}, {"role": "user", "content": "+2"}])
    [{'role': 'user', 'content': '2\\n\\n+2'}]

    Raises ValueError for anything but a list of messages with known roles.
    """
    if not isinstance(messages, list):
        raise ValueError(f"expected a list of messages, got {type(messages).__name__}")
    plain = [_plain(message, place) for place, message in enumerate(messages)]
    full = [m for m in plain if m["content"] or m.get("tool_calls") or m["role"] == "tool"]
    ordered = sorted(full, key=lambda m: m["role"] != "system")
    made: list[dict[str, Any]] = []
    for message in ordered:
        if made and _may_join(made[-1], message):
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message)
    return made


def _plain(message: object, place: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {place} is a {type(message).__name__}, expected a mapping")
    role = message.get("role", message.get("from"))
    known = _ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise ValueError(
            f"message {place} has the role {role!r}, expected system, user, assistant or tool"
        )
    content = message.get("content", message.get("value"))
    if content is None or isinstance(content, int | float):
        content = "" if content is None else str(content)
    elif isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    rest = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value")}
    return {"role": known, "content": content, **rest}


def _may_join(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two messages have the same role and only text."""
    return one["role"] == other["role"] != "tool" and all(
        isinstance(m["content"], str) and set(m) == {"role", "content"} for m in (one, other)
    )
