"""Tool calls in the text of an answer: where they begin and end, and what they ask for."""

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...store.errors import ConfigError, nearest
from ...store.records import Message

Read = tuple[str, list[dict[str, Any]]]
"""What an answer says beside its calls, and its calls: `{name, arguments}`, maybe with an `id`."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_CALL = re.compile(r"\s*([\w.-]+)\.call\((.*)\)\s*", re.DOTALL)
_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]\s*(.*)", re.DOTALL)
_TAG, _MARK, _FENCE = "<|python_tag|>", "[TOOL_CALLS]", "```"


def assistant_message(
    text: str, tools: Sequence[dict[str, Any]] | None, *, tool_call_format: str = "hermes"
) -> Message:
    """Return an answer as a message; with tools, its calls stand apart from its content.

    `tool_call_format` is one of FORMATS: how the model writes calls. A call that cannot be read
    keeps its text as `arguments` and has no name, for whoever calls tools to refuse.

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
    """Lets through what an answer says beside its calls, as far as that is sure as it comes.

    Nothing is, from where a call may begin. Spaces come with what follows them, since an answer
    that calls tools has none at its end.

    >>> beside = OutsideToolCalls("hermes")
    >>> [beside(part) for part in ("Let me ", "see. <to", "ol_call>{", "} Now")]
    ['Let me', ' see.', '', '']
    """

    def __init__(self, tool_call_format: str) -> None:
        self._mark = _MARKS[tool_call_format]
        self._may_be_bare = tool_call_format in _BARE
        self._kept = ""
        self._is_over = False

    def __call__(self, text: str) -> str:
        """Return what may be told of an answer that goes on with a text."""
        if self._is_over:
            return ""
        self._kept += text
        if not text.strip() or (self._may_be_bare and not self._is_prose()):
            return ""
        sure, mark, _ = self._kept.partition(self._mark)
        self._is_over = bool(mark)
        if not mark:
            sure = sure[: len(sure) - _overlap(sure, self._mark)]
        said = sure.rstrip()
        self._kept = self._kept[len(said) :]
        return said

    def _is_prose(self) -> bool:
        """Tell whether an answer begins like what is no bare call."""
        begun = self._kept.lstrip()
        self._is_over = begun.startswith(("{", "[", _FENCE))
        self._may_be_bare = self._is_over or _FENCE.startswith(begun)
        return not self._may_be_bare


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text a mark may begin with."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def of_text(text: str, *, tool_call_format: str) -> str:
    """Write a call that could not be read as the model wrote it."""
    before, behind = _AROUND[tool_call_format]
    return f"{before}{text}{behind}"


def known_format(name: str) -> str:
    """Return the name of a format; raises ConfigError when there is none."""
    if name not in FORMATS:
        raise ConfigError(f"there is no tool format `{name}`{nearest(name, FORMATS)}")
    return name


def _call(call: dict[str, Any], number: int) -> dict[str, Any]:
    arguments = call["arguments"]
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": call["name"], "arguments": as_text}
    # nine letters and digits: some templates refuse other ids
    return {"id": call.get("id") or f"call{number:05d}", "type": "function", "function": function}


def _hermes(text: str) -> Read:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write."""
    found = [_one(match.group(1)) for match in _HERMES.finditer(text)]
    return _HERMES.sub("", text), found


def _llama(text: str) -> Read:
    """Read what Llama 3 writes: bare JSON objects, or either call behind `<|python_tag|>`."""
    before, tag, behind = text.partition(_TAG)
    if not tag:
        return _json(text)
    python = _PYTHON_CALL.fullmatch(behind)
    if python is None:
        return before, _several(behind) or [_unread(behind)]
    return before, [_of_python(python.group(1), python.group(2), behind)]


def _mistral(text: str) -> Read:
    """Read `[TOOL_CALLS]` and a JSON list, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
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
    """Read an answer that is nothing but JSON: a call, several, or a list of them."""
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
"""How models write tool calls, by name."""
_MARKS = {"hermes": "<tool_call>", "llama": _TAG, "mistral": _MARK, "json": _TAG}
"""What no content goes on behind."""
_BARE = ("llama", "json")
"""Those in which an answer may be nothing but JSON."""
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
    """Return the calls of JSON values one behind the other, `;` between them or not."""
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
    """Read `name.call(key=value)`, whose values are literals."""
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
        keywords = call.keywords if isinstance(call, ast.Call) and not call.args else []
        values = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
        json.dumps(values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return _unread(text)
    return {"name": name, "arguments": values} if values or not arguments else _unread(text)
