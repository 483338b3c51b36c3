"""The conversations and tools of requests in OpenAI's format, as templates read them."""

import json
from collections.abc import Mapping
from typing import Any

from ...store.errors import InputError
from ...store.image_parts import is_image, source_of
from ...store.records import Message, proper
from .errors import RequestError

MOST_LEVELS = 100
"""Deepest nesting of a schema."""
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_SHOWS = ("user", "tool")
"""Roles whose messages may show images."""
_KEPT = ("name", "tool_call_id", "reasoning_content")


def canonical(message: Message) -> Message:
    """Return the parts of a message that a chat template reads.

    >>> canonical({"role": "user", "content": [{"type": "text", "text": "hi"}], "refusal": None})
    {'role': 'user', 'content': 'hi'}
    """
    return _message(message, 0)


def same_answer(one: Message, other: Message) -> bool:
    """Return whether two answers are equal up to call ids and the spelling of arguments."""
    if not one.get("role") == other.get("role") == "assistant":  # others may show images
        return False
    calls = [[_call_of(c) for c in m.get("tool_calls") or ()] for m in (one, other)]
    texts = [(m.get("content") or "").strip() for m in (one, other)]
    return texts[0] == texts[1] and calls[0] == calls[1]


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """Return the tools of a request. Raises RequestError."""
    if not isinstance(tools, list):
        raise RequestError(f"`tools` must be a list, got {kind_of(tools)}", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where = f"tools.{i}"
            raise RequestError(
                f'`{where}` must be {{"type": "function", "function": {{"name": ...}}}}',
                param=where,
            )
        whole_text(function["name"], f"tools.{i}.function.name")
    return [bounded(tool, "tools") for tool in tools]


def kind_of(value: Any) -> str:
    """Return what kind of JSON value this is, in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def messages_of(value: Any) -> list[Message]:
    """Return the messages of a request. Raises RequestError."""
    if not isinstance(value, list) or not value:
        got = kind_of(value) if not isinstance(value, list) else "an empty one"
        raise RequestError(f"`messages` must be a list of messages, got {got}", param="messages")
    return [_message(message, i) for i, message in enumerate(value)]


def _message(message: Any, i: int) -> Message:
    where = f"messages.{i}"
    if not isinstance(message, dict):
        raise RequestError(f"`{where}` must be an object, got {kind_of(message)}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"`{where}.role` is one of {', '.join(sorted(_ROLES))}, got {role!r:.100}",
            param=f"{where}.role",
        )
    # Only the assistant calls tools: templates would write another role's calls as its own.
    calls = message.get("tool_calls") if role == "assistant" else None
    content = _content(message.get("content"), f"{where}.content", role)
    made: Message = {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        made["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    for name in _KEPT:
        if isinstance(message.get(name), str):
            made[name] = proper(message[name])
    if "name" in made:
        whole_text(message["name"], f"{where}.name")
    return made


def _content(value: Any, where: str, role: str) -> str | list[dict[str, Any]]:
    if value is None and role in ("assistant", "tool"):
        return ""
    if isinstance(value, str):
        return proper(value)
    if not isinstance(value, list):
        raise RequestError(f"`{where}` must be a text, got {kind_of(value)}", param=where)
    parts = [_part(part, where, role) for part in value]
    if any(map(is_image, parts)):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: Any, where: str, role: str) -> dict[str, Any]:
    if is_image(part) and role in _SHOWS:
        return _image(part, where)
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestError(
            f"`{where}` has a part that is not text; send parts of text, or of images "
            f"(`image_url`) in messages of {' and '.join(_SHOWS)}",
            param=where,
        )
    return {"type": "text", "text": proper(text)}


def _image(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return an image as OpenAI writes it, or the id of a stored one."""
    try:
        named, source = part.get("media_id"), source_of(part)
    except InputError as error:
        raise RequestError(f"`{where}`: {error}", param=where) from error
    if isinstance(named, str):
        return {"type": "image", "media_id": proper(named)}
    if not isinstance(source, str):
        message = f"`{where}` has an image without a `url`, expected a data URL; add it"
        raise RequestError(message, param=where)
    link = part.get("image_url")
    detail = (link if isinstance(link, dict) else part).get("detail")
    if detail not in (None, "auto", "high", "original"):
        raise RequestError(
            f"`{where}` has an image with `detail` {detail!r:.50}, and images are not made "
            "smaller; leave it out",
            param=where,
        )
    return {"type": "image_url", "image_url": {"url": source}}


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    made = []
    for i, call in enumerate(value if isinstance(value, list) else [value]):
        function: Any = call.get("function") if isinstance(call, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or not isinstance(function.get("arguments"), str):
            message = "must have a `function` with `name` and `arguments`, which is a text"
            raise RequestError(f"`{where}.{i}` {message}", param=f"{where}.{i}")
        kept = {"name": proper(function["name"]), "arguments": proper(function["arguments"])}
        made.append(
            {"id": proper(str(call.get("id") or f"call_{i}")), "type": "function", "function": kept}
        )
    return made


def _call_of(call: Mapping[str, Any]) -> tuple[str, Any]:
    function = call["function"]
    try:
        return function["name"], json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function["name"], function["arguments"]


def bounded(value: Any, where: str, left: int = MOST_LEVELS) -> Any:
    """Return JSON whose texts can be stored. Raises RequestError if it is nested too deep."""
    if isinstance(value, str):
        return proper(value)
    if left < 1 and isinstance(value, list | dict):
        raise RequestError(f"`{where}` is nested deeper than {MOST_LEVELS} levels", param=where)
    if isinstance(value, list):
        return [bounded(part, where, left - 1) for part in value]
    if isinstance(value, dict):
        return {proper(str(k)): bounded(part, where, left - 1) for k, part in value.items()}
    return value


def whole_text(value: str, where: str) -> str:
    """Return a text that can be stored. Raises RequestError for half of a surrogate pair."""
    if proper(value) != value:
        raise RequestError(f"`{where}` holds half of a surrogate pair", param=where)
    return value
