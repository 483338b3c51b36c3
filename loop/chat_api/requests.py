"""OpenAI's chat format: from the JSON of a request to the arguments of a policy.

Independent of HTTP servers. A parameter that would change the tokens and is not supported is
refused by its name; one that changes no token (`store`, `parallel_tool_calls`) is ignored.
"""

import json
import string
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote, unquote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from ...store.records import Message, proper
from ..inference.policy import OTHERS, Sampling
from .errors import RequestError

MOST_CHOICES = 64
"""Most answers to one request."""
MOST_STOPS = 16
MOST_BIASES = 1024
"""Most tokens in `logit_bias`, as in vLLM."""
UNSUPPORTED = (
    *("functions", "function_call", "audio", "prediction", "web_search_options"),
    *("best_of", "use_beam_search", "length_penalty", "stop_token_ids", "bad_words"),
    *("allowed_token_ids", "logits_processors", "prompt_logprobs", "echo", "suffix"),
)
"""Parameters of OpenAI and of vLLM that would change an answer, and are refused if set."""
MOST_LEVELS = 100
"""Deepest nesting of a tool's schema."""
LONGEST_ID = 200
"""Most characters of the name of a session or group."""
_LARGEST = (1 << 63) - 1
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "seed", *OTHERS)
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_KEPT = ("name", "tool_call_id", "reasoning_content")


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises RequestError for anything else."""
    try:
        # Python also reads NaN and Infinity, which JSON lacks and no sampling setting allows
        message = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = "is nested too deep" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise RequestError(f"the request's body {why}") from error
    if not isinstance(message, dict):
        raise RequestError(f"the request's body must be an object, got {_kind(message)}")
    return message


def identifier(value: Any, param: str) -> str | None:
    """Return a valid name of a session or group. Raises RequestError for any other value."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_ID or not value.isprintable():
        message = f"`{param}` must be a text of 1 to {LONGEST_ID} printable characters"
        raise RequestError(message, param=param)
    return value


def canonical(message: Message) -> Message:
    """Return the parts of a message that a chat template reads.

    >>> canonical({"role": "user", "content": [{"type": "text", "text": "hi"}], "refusal": None})
    {'role': 'user', 'content': 'hi'}
    """
    return _message(message, 0)


def same_answer(one: Message, other: Message) -> bool:
    """Return whether two answers are equal up to call ids and the spelling of arguments."""
    calls = [[_call_of(c) for c in m.get("tool_calls") or ()] for m in (one, other)]
    texts = [(m.get("content") or "").strip() for m in (one, other)]
    same = one.get("role") == other.get("role") == "assistant"
    return same and texts[0] == texts[1] and calls[0] == calls[1]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _check_possible(body: Mapping[str, Any]) -> None:
    """Refuse parameters that would change the tokens and are not supported."""
    for name in UNSUPPORTED:
        if body.get(name):
            raise RequestError(f"`{name}` is not supported; leave it out", param=name)
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise RequestError(
            "`response_format` must be text; other formats are not supported",
            param="response_format",
        )
    if body.get("top_logprobs"):
        raise RequestError(
            "log-probs are of sampled tokens only; leave `top_logprobs` out", param="top_logprobs"
        )


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise RequestError(f"`tools` must be a list, got {_kind(tools)}", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where = f"tools.{i}"
            raise RequestError(
                f'`{where}` must be {{"type": "function", "function": {{"name": ...}}}}',
                param=where,
            )
        _whole_text(function["name"], f"tools.{i}.function.name")
    return [_proper(tool, "tools") for tool in tools]


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError("`stop` must be a text, or a list of texts", param="stop")
    if len(stops) > MOST_STOPS:
        raise RequestError(f"`stop` has at most {MOST_STOPS} texts", param="stop")
    return tuple(_whole_text(stop, "stop") for stop in stops)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        message = f"`logit_bias` must be an object of tokens and biases, got {_kind(value)}"
        raise RequestError(message, param="logit_bias")
    if len(value) > MOST_BIASES:
        message = f"`logit_bias` has {len(value):,} tokens, at most {MOST_BIASES:,} are possible"
        raise RequestError(message, param="logit_bias")
    made = []
    for token, bias in value.items():
        is_token = token.isascii() and token.isdigit() and len(token) < 10
        is_bias = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= 100
        if not (is_token and is_bias):
            raise RequestError(
                f"`logit_bias` has {token!r:.50}: {bias!r:.50}, expected the number of a token and "
                "a bias from -100 to 100",
                param="logit_bias",
            )
        made.append((int(token), float(bias)))
    return tuple(made)


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
        _whole_text(message["name"], f"{where}.name")
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
            f"`{where}` has a part that is not text; send parts of text only", param=where
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


def _whole_text(value: str, where: str) -> str:
    if proper(value) != value:
        raise RequestError(f"`{where}` holds half of a surrogate pair", param=where)
    return value


_request_id = partial(identifier, param="request_id")


class ChatRequest(BaseModel):
    """A checked request for answers; `null` stands for a parameter that is not given."""

    # Strict: a number in quotes is a client's mistake, and guessing would change the tokens.
    model_config = ConfigDict(strict=True, frozen=True)

    messages: Annotated[list[Message], BeforeValidator(_messages)]
    model: Annotated[str, AfterValidator(partial(_whole_text, where="model"))] | None = None
    given_tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(_tools)] = Field(
        default=None, validation_alias="tools"
    )
    tool_choice: Literal["auto", "none"] = "auto"
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(default=None, ge=0, le=2)
    # 0 would leave no token to sample
    top_p: float | None = Field(default=None, ge=1e-9, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_LARGEST)
    """0 or -1, as in vLLM: all tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    """The newer name of `max_tokens`, which it overrides."""
    stop: Annotated[tuple[str, ...] | None, BeforeValidator(_stops)] = None
    min_tokens: int | None = Field(default=None, ge=0, le=_LARGEST)
    ignore_eos: bool | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[tuple[tuple[int, float], ...] | None, BeforeValidator(_biases)] = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    seed: int | None = Field(default=None, ge=-_LARGEST - 1, le=_LARGEST)
    is_streamed: bool = Field(default=False, validation_alias="stream")
    wants_logprobs: bool = Field(default=False, validation_alias="logprobs")
    wants_token_ids: bool = Field(default=False, validation_alias="return_token_ids")
    stream_options: dict[str, Any] = Field(default={})
    metadata: dict[str, Any] = Field(default={})
    user: Any = None
    request_id: Annotated[str | None, BeforeValidator(_request_id)] = None
    """The client's name of the request, as in vLLM; the same in a retry."""

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        return (self.given_tools or None) if self.tool_choice == "auto" else None

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed answer ends with the number of tokens."""
        return bool(self.stream_options.get("include_usage"))

    @property
    def session_id(self) -> str | None:
        """The name of the session: `metadata.session_id`, or else `user`."""
        session, user = self.metadata.get("session_id"), self.user
        session = user if session is None and isinstance(user, str) and user else session
        return identifier(session, "metadata.session_id")

    @property
    def group_id(self) -> str | None:
        """The name of the group: `metadata.group_id`."""
        return identifier(self.metadata.get("group_id"), "metadata.group_id")

    def sampling(self, default: Sampling) -> Sampling:
        """Return how to sample: the default with the request's parameters."""
        values = {name: getattr(self, name) for name in _SAMPLING}
        values["top_k"] = max(self.top_k, 0) if self.top_k is not None else None
        values["max_tokens"] = self.max_completion_tokens or self.max_tokens
        made = replace(default, **{name: v for name, v in values.items() if v is not None})
        if self.min_tokens and self.min_tokens > made.max_tokens:
            message = f"`min_tokens` is {self.min_tokens}, more than the {made.max_tokens} at most"
            raise RequestError(message, param="min_tokens")
        # a default of the server must not exceed what the request asks for
        return replace(made, min_tokens=min(made.min_tokens, made.max_tokens))

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        _ = self.session_id, self.group_id  # raise RequestError
        return self


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request in a body of `/v1/chat/completions`. Raises RequestError."""
    _check_possible(body)
    given = {name: value for name, value in body.items() if value is not None}
    try:
        # None, so that missing messages are refused in our words too
        return ChatRequest.model_validate({"messages": None, **given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if isinstance(cause := first.get("ctx", {}).get("error"), RequestError):
            raise cause from None
        param = str(first["loc"][0])
        message = first["msg"].replace("Input should be", "must be")
        message = f"`{param}` {message}, got {first['input']!r:.100}"
        raise RequestError(message, param=param) from error


_AS_THEY_ARE = (string.punctuation + "~").replace("%", "")


def for_header(name: str) -> str:
    """Return a name, percent-encoded for a header.

    >>> for_header("agent-7"), for_header("žluť 50%")
    ('agent-7', '%C5%BElu%C5%A5%2050%25')
    """
    return quote(name, safe=_AS_THEY_ARE)


def of_header(headers: Mapping[str, str], name: str) -> str | None:
    """Return the name in a header, plain or percent-encoded. Raises RequestError.

    >>> of_header({"X-Session-Id": "%C5%BElu%C5%A5"}, "X-Session-Id")
    'žluť'
    """
    message = headers.get(name)
    if message is None:
        return None
    try:
        text = message.encode("latin-1").decode()  # undoes the decoding of HTTP headers
    except UnicodeError:
        text = message
    try:
        return identifier(unquote(text, errors="strict"), name)
    except UnicodeDecodeError:
        raise RequestError(f"`{name}` must be percent-encoded UTF-8", param=name) from None
