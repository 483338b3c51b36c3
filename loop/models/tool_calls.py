"""Parse tool calls in the text of an answer."""

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...store.errors import ConfigError, nearest
from ...store.records import Message

Read = tuple[str, list[dict[str, Any]]]
"""The text outside the calls, and the calls: `{name, arguments}`, possibly with an `id`."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_CALL = re.compile(r"\s*([\w.-]+)\.call\((.*)\)\s*", re.DOTALL)
_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]\s*(.*)", re.DOTALL)
_TAG, _MARK, _FENCE = "<|python_tag|>", "[TOOL_CALLS]", "```"


def assistant_message(
    text: str, tools: Sequence[dict[str, Any]] | None, *, tool_call_format: str = "hermes"
) -> Message:
    """Return an answer as a message; with tools, its calls are separate from its content.

    `tool_call_format` is one of FORMATS. A call that cannot be parsed has its text as `arguments`
    and an empty name, which no tool has.

    >>> text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    >>> assistant_message(text, [{"type": "function"}])["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"a": 1}'}
    """
    content, calls = FORMATS[tool_call_format](text) if tools else (text, [])
    if not calls:
        return {"role": "assistant", "content": text}
    made = [_call(call, i) for i, call in enumerate(calls)]
    return {"role": "assistant", "content": content.strip(), "tool_calls": made}


class OutsideToolCalls:
    """Passes the text outside an answer's tool calls, as soon as it is known to be outside.

    Text that may begin a call is held back. Whitespace is passed with the text after it, since the
    content of an answer with tool calls has none at its end.

    >>> text = OutsideToolCalls("hermes")
    >>> [text(part) for part in ("Let me ", "see. <to", "ol_call>{", "} Now")]
    ['Let me', ' see.', '', '']
    """

    def __init__(self, tool_call_format: str) -> None:
        self._mark = _MARKS[tool_call_format]
        self._may_be_bare = tool_call_format in _BARE
        self._kept = ""
        self._is_over = False

    def __call__(self, text: str) -> str:
        """Return the text that can be streamed after an answer continues with `text`."""
        if self._is_over:
            return ""
        self._kept += text
        if not text.strip() or (self._may_be_bare and not self._is_prose()):
            return ""
        sure, mark, _ = self._kept.partition(self._mark)
        self._is_over = bool(mark)
        if not mark:
            sure = sure[: len(sure) - overlap(sure, self._mark)]
        passed = sure.rstrip()
        self._kept = self._kept[len(passed) :]
        return passed

    def _is_prose(self) -> bool:
        """Return whether an answer cannot be a bare call."""
        begun = self._kept.lstrip()
        self._is_over = begun.startswith(("{", "[", _FENCE))
        self._may_be_bare = self._is_over or _FENCE.startswith(begun)
        return not self._may_be_bare


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text with which a mark may begin."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def of_text(text: str, *, tool_call_format: str) -> str:
    """Return a call that could not be parsed as the model wrote it."""
    before, behind = _AROUND[tool_call_format]
    return f"{before}{text}{behind}"


def known_format(name: str) -> str:
    """Return the name of a format; ConfigError if it does not exist."""
    if name not in FORMATS:
        raise ConfigError(f"tool format `{name}` does not exist{nearest(name, FORMATS)}")
    return name


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    arguments = call["arguments"]
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": call["name"], "arguments": as_text}
    # Nine letters and digits: the templates of some models refuse other IDs.
    return {"id": call.get("id") or f"call{number:05d}", "type": "function", "function": function}


def _hermes(text: str) -> Read:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as in Hermes and Qwen."""
    found = [_one(match.group(1)) for match in _HERMES.finditer(text)]
    return _HERMES.sub("", text), found


def _llama(text: str) -> Read:
    """Parse the calls of Llama 3: bare JSON objects, or either call after `<|python_tag|>`."""
    before, tag, behind = text.partition(_TAG)
    if not tag:
        return _json(text)
    python = _PYTHON_CALL.fullmatch(behind)
    if python is None:
        return before, _several(behind) or [_unread(behind)]
    return before, [_of_python(python.group(1), python.group(2), behind)]


def _mistral(text: str) -> Read:
    """Parse `[TOOL_CALLS]` and a JSON list, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    before, *parts = text.split(_MARK)
    calls: list[dict[str, Any]] = []
    for part in parts:
        named = _MISTRAL_CALL.fullmatch(part)
        if named is None:
            calls += _several(part) or [_unread(part)]
        else:
            value = _value(named.group(3))
            arguments = named.group(3) if value is None else value
            calls.append({"name": named.group(1), "arguments": arguments, "id": named.group(2)})
    return before, calls


def _json(text: str) -> Read:
    """Parse an answer that is only JSON: a call, several, or a list of them."""
    inner = text.strip()
    if inner.startswith(_FENCE) and inner.endswith(_FENCE) and len(inner) >= 2 * len(_FENCE):
        inner = inner[len(_FENCE) : -len(_FENCE)].removeprefix("json").strip()
    calls = _several(inner) if inner[:1] in ("{", "[") else []
    if any(call["name"] for call in calls):
        return "", calls
    looks_like_one = inner.startswith(("{", "[{")) and '"name"' in inner
    return ("", [_unread(inner)]) if looks_like_one else (text, [])


FORMATS: dict[str, Callable[[str], Read]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
    "json": _json,
}
"""The formats of tool calls, by name."""
_MARKS = {"hermes": "<tool_call>", "llama": _TAG, "mistral": _MARK, "json": _TAG}
"""The mark after which an answer has no more content."""
_BARE = ("llama", "json")
"""The formats in which an answer may be only JSON."""
_AROUND = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "llama": ("", ""),
    "mistral": (_MARK, ""),
    "json": ("", ""),
}


def _one(text: str) -> dict[str, Any]:
    value = _value(text)
    return _unread(text) if value is None else _named(value, text)


def _several(text: str) -> list[dict[str, Any]]:
    """Return the calls of consecutive JSON values, with or without `;` between them."""
    decoder, place, calls = json.JSONDecoder(), 0, []
    while place < len(text):
        if text[place] in " \t\r\n;":
            place += 1
            continue
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        values = value if isinstance(value, list) else [value]
        calls += [_named(one, text[place:end]) for one in values]
        place = end
    return calls


def _named(value: Any, text: str) -> dict[str, Any]:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return _unread(text)
    arguments = value.get("arguments", value.get("parameters", {}))
    given = value.get("id")
    return {"name": name, "arguments": arguments, "id": given if isinstance(given, str) else None}


def _unread(text: str) -> dict[str, Any]:
    return {"name": "", "arguments": text.strip()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _of_python(name: str, arguments: str, text: str) -> dict[str, Any]:
    """Parse `name.call(key=value)`, whose values are literals."""
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        keywords = call.keywords if isinstance(call, ast.Call) and not call.args else []
        values = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
        json.dumps(values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return _unread(text)
    return {"name": name, "arguments": values} if values or not arguments else _unread(text)
