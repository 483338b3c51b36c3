"""OpenAI's chat format: from a request's JSON to what a policy is asked.

Knows nothing of HTTP servers. What a request asks for and cannot be given is refused with the
parameter's name; what changes no token (`user`, `store`, `parallel_tool_calls`) is passed over.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ...store.records import Message, proper
from ..inference.policy import Sampling
from .errors import RequestError

T = TypeVar("T")

MOST_CHOICES = 64
"""Answers to one request at most."""
MOST_STOPS = 16
MOST_LEVELS = 100
"""Of a tool's schema, objects in objects."""
LONGEST_ID = 200
"""Characters of a session's or group's name."""
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_KEPT = ("name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request for answers, checked."""

    messages: list[Message]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    n: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What it says of Sampling."""
    is_streamed: bool = False
    wants_usage: bool = False
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    session_id: str | None = None
    """Of `metadata.session_id`, or else `user`."""
    group_id: str | None = None
    """Of `metadata.group_id`."""
    request_id: str | None = None
    """What a client calls the request, as vLLM has it; the same when it tries again."""

    def sampling(self, default: Sampling) -> Sampling:
        """Return how tokens are chosen: as asked, or else by default."""
        return replace(default, **self.changes)


def parse(body: bytes) -> dict[str, Any]:
    """Return a request's body, which is one JSON object; RequestError for anything else."""
    try:
        message = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = "is nested too deep" if isinstance(error, RecursionError) else f"is no JSON: {error}"
        raise RequestError(f"the request's body {why}") from error
    if not isinstance(message, dict):
        raise RequestError(f"the request's body must be an object, got {_kind(message)}")
    return message


def read_chat(body: Mapping[str, Any]) -> Asked:
    """Return what a body of `/v1/chat/completions` asks for; RequestError for nonsense."""
    _check_possible(body)
    options = _object(body, "stream_options")
    metadata = _object(body, "metadata")
    user = body.get("user")
    session = metadata.get("session_id")
    session = user if session is None and isinstance(user, str) and user else session
    return Asked(
        messages=_messages(body.get("messages")),
        model=_whole_text(_given(body, "model", str, "a text"), "model"),
        tools=_tools(body),
        n=_whole(body, "n", low=1, high=MOST_CHOICES) or 1,
        changes=_changes(body),
        is_streamed=_flag(body, "stream"),
        wants_usage=bool(options.get("include_usage")),
        wants_logprobs=_flag(body, "logprobs"),
        wants_token_ids=_flag(body, "return_token_ids"),
        session_id=identifier(session, "metadata.session_id"),
        group_id=identifier(metadata.get("group_id"), "metadata.group_id"),
        request_id=identifier(body.get("request_id"), "request_id"),
    )


def identifier(value: Any, param: str) -> str | None:
    """Return the name of a session or group; RequestError for what is none."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID or not value.isprintable():
        message = f"`{param}` must be a text of 1 to {LONGEST_ID} printable characters"
        raise RequestError(message, param=param)
    return value


def canonical(message: Message) -> Message:
    """Return a message with what a chat template reads, however a client spells the rest.

    >>> canonical({"role": "user", "content": [{"type": "text", "text": "hi"}], "refusal": None})
    {'role': 'user', 'content': 'hi'}
    """
    return _message(message, 0)


def same_answer(one: Message, other: Message) -> bool:
    """Tell whether two messages say the same: names of calls, and spelling of arguments, aside."""
    calls = [[_call_of(c) for c in m.get("tool_calls") or ()] for m in (one, other)]
    texts = [(m.get("content") or "").strip() for m in (one, other)]
    same = one.get("role") == other.get("role") == "assistant"
    return same and texts[0] == texts[1] and calls[0] == calls[1]


# reading


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _check_possible(body: Mapping[str, Any]) -> None:
    """Refuse what would change the tokens, and cannot be done."""
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "functions"):
        if body.get(name):
            raise RequestError(f"`{name}` is not possible here; leave it out", param=name)
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise RequestError("only `response_format` text is possible", param="response_format")
    if body.get("top_logprobs"):
        raise RequestError(
            "only sampled tokens have log-probs here; leave `top_logprobs` out",
            param="top_logprobs",
        )


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise RequestError(f"`tools` must be a list, got {_kind(tools)}", param="tools")
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where = f"tools.{i}"
            raise RequestError(
                f'`{where}` must be {{"type": "function", "function": {{"name": ...}}}}',
                param=where,
            )
        _whole_text(function["name"], f"tools.{i}.function.name")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"`tool_choice` is auto or none here, got {choice!r:.100}", param="tool_choice"
        )
    return [_proper(tool, "tools") for tool in tools] if tools and choice != "none" else None


def _changes(body: Mapping[str, Any]) -> dict[str, Any]:
    newer, older = "max_completion_tokens", "max_tokens"
    most = _whole(body, newer, low=1) or _whole(body, older, low=1)
    found = {
        "temperature": _number(body, "temperature", low=0.0, high=2.0),
        "top_p": _number(body, "top_p", low=1e-9, high=1.0),
        "top_k": _whole(body, "top_k", low=-1),
        "min_p": _number(body, "min_p", low=0.0, high=1.0),
        "max_tokens": most,
        "stop": _stops(body.get("stop")),
        "seed": _whole(body, "seed", low=-(1 << 63)),
    }
    if found["top_k"] == -1:  # as vLLM says that all are
        found["top_k"] = 0
    return {name: value for name, value in found.items() if value is not None}


def _stops(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError("`stop` must be a text, or a list of texts", param="stop")
    if len(stops) > MOST_STOPS:
        raise RequestError(f"`stop` has at most {MOST_STOPS} texts", param="stop")
    return tuple(_whole_text(stop, "stop") or "" for stop in stops)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        got = _kind(value) if not isinstance(value, list) else "an empty one"
        raise RequestError(f"`messages` must be a list of messages, got {got}", param="messages")
    return [_message(message, i) for i, message in enumerate(value)]


def _message(message: Any, i: int) -> Message:
    where = f"messages.{i}"
    if not isinstance(message, dict):
        raise RequestError(f"`{where}` must be an object, got {_kind(message)}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"`{where}.role` is one of {', '.join(sorted(_ROLES))}, got {role!r:.100}",
            param=f"{where}.role",
        )
    calls = message.get("tool_calls") if role == "assistant" else None
    content = _content(message.get("content"), f"{where}.content", role)
    made: Message = {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        made["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    for name in _KEPT:
        if isinstance(message.get(name), str):
            made[name] = proper(message[name])
    _whole_text(message.get("name") if "name" in made else None, f"{where}.name")
    return made


def _content(value: Any, where: str, role: str) -> str:
    if value is None and role in ("assistant", "tool"):
        return ""
    if isinstance(value, str):
        return proper(value)
    if not isinstance(value, list):
        raise RequestError(f"`{where}` must be a text, got {_kind(value)}", param=where)
    texts: list[Any] = [p.get("text") if isinstance(p, dict) else None for p in value]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"`{where}` has a part that is no text; texts alone are read", param=where
        )
    return proper("".join(texts))


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


def _proper(value: Any, where: str, left: int = MOST_LEVELS) -> Any:
    if isinstance(value, str):
        return proper(value)
    if left < 1 and isinstance(value, list | dict):
        raise RequestError(f"`{where}` is nested deeper than {MOST_LEVELS} levels", param=where)
    if isinstance(value, list):
        return [_proper(part, where, left - 1) for part in value]
    if isinstance(value, dict):
        return {proper(str(k)): _proper(part, where, left - 1) for k, part in value.items()}
    return value


def _whole_text(value: str | None, where: str) -> str | None:
    if value is not None and proper(value) != value:
        raise RequestError(f"`{where}` holds half of a surrogate pair", param=where)
    return value


def _given(body: Mapping[str, Any], name: str, kind: type[T], told: str) -> T | None:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"`{name}` must be {told}, got {_kind(value)}", param=name)
    return value


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _given(body, name, dict, "an object") or {}


def _flag(body: Mapping[str, Any], name: str) -> bool:
    return bool(_given(body, name, bool, "true or false"))


def _whole(
    body: Mapping[str, Any], name: str, *, low: int, high: int = (1 << 63) - 1
) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        most = "" if high == (1 << 63) - 1 else f" to {high}"
        message = f"`{name}` must be a whole number from {low}{most}, got {value!r:.100}"
        raise RequestError(message, param=name)
    return value


def _number(body: Mapping[str, Any], name: str, *, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or not low <= value <= high:  # which no NaN is
        message = f"`{name}` must be a number from {low:g} to {high:g}, got {value!r:.100}"
        raise RequestError(message, param=name)
    return float(value)
