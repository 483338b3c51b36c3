"""OpenAI's responses API: its items become messages, and answers become its items and events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from ..inference.policy import Completion
from ..models.reasoning import MarkedParts
from . import responses
from .errors import RequestError
from .exchange import ChatExchange
from .messages import kind_of
from .requests import ChatRequest, identifier, parameters_of, validated

_LOGPROBS = "message.output_text.logprobs"
_OWN = (
    *("input", "instructions", "text", "max_output_tokens", "include", "truncation", "reasoning"),
    *("previous_response_id", "background"),
)
_TEXTS = ("input_text", "output_text", "text")


class ResponseRequest(ChatRequest):
    """A checked request of the responses API."""

    given: dict[str, Any] = Field(default={})
    """The body as it was sent."""

    @property
    def previous_id(self) -> str | None:  # type: ignore[override]
        """The response that the conversation continues."""
        return identifier(self.given.get("previous_response_id"), "previous_response_id")

    @property
    def truncates(self) -> bool:  # type: ignore[override]
        """Whether the oldest messages are left out where a prompt is too long."""
        return self.given.get("truncation") == "auto"

    @property
    def is_kept(self) -> bool:
        """Whether a later request may continue from the response."""
        return self.given.get("store") is not False


_KNOWN = (
    parameters_of(ChatRequest)
    - {"messages", "n", "max_tokens", "max_completion_tokens", "response_format", "logprobs"}
    - {"modalities", "return_token_ids"}
) | set(_OWN)
_CHAT_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format"}


def read(body: Mapping[str, Any]) -> ResponseRequest:
    """Return the request in a body of `/v1/responses`. Raises RequestError."""
    _check(body)
    known = _KNOWN | {"messages", "response_format", "max_tokens", "logprobs"}
    try:
        asked = validated(ResponseRequest, _as_chat(body), known)
    except RequestError as error:
        param = error.param or ""
        error.param = _CHAT_NAMES.get(param, param.replace("messages", "input", 1)) or None
        raise
    return asked.model_copy(update={"given": dict(body)})


def _check(body: Mapping[str, Any]) -> None:
    for name in body:
        if name not in _KNOWN and body[name] is not None:
            raise RequestError(f"`{name:.100}` is not supported; leave it out", param=name[:100])
    if body.get("background"):
        raise RequestError("`background` is not supported; leave it out", param="background")
    if any(value is not None for value in (body.get("reasoning") or {}).values()):
        raise RequestError("`reasoning` cannot be set; leave it out", param="reasoning")
    if body.get("truncation") not in (None, "auto", "disabled"):
        message = f"`truncation` must be auto or disabled, got {body['truncation']!r:.100}"
        raise RequestError(message, param="truncation")
    include = body.get("include") or []
    if not isinstance(include, list) or set(map(str, include)) - {_LOGPROBS}:
        message = f"`include` can have `{_LOGPROBS}` only, got {include!r:.200}"
        raise RequestError(message, param="include")


def _as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body of the responses API as one of the chat API."""
    made = {k: v for k, v in body.items() if k not in _OWN and k not in ("tools", "tool_choice")}
    instructions = body.get("instructions")
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    made["messages"] = [*system, *_messages(body.get("input"))]
    made["max_tokens"] = body.get("max_output_tokens")
    made["logprobs"] = _LOGPROBS in (body.get("include") or []) or bool(body.get("top_logprobs"))
    made["response_format"] = _format(body.get("text"))
    if body.get("tools") is not None:
        made["tools"] = _tools(body["tools"])
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    made["tool_choice"] = choice
    return made


def _format(text: Any) -> Any:
    if text is not None and not isinstance(text, dict):
        raise RequestError(f"`text` must be an object, got {kind_of(text)}", param="text")
    if (text or {}).get("verbosity") is not None:
        message = "`text.verbosity` is not supported; leave it out"
        raise RequestError(message, param="text.verbosity")
    form = (text or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form


def _tools(tools: Any) -> list[Any]:
    if not isinstance(tools, list):
        raise RequestError(f"`tools` must be a list, got {kind_of(tools)}", param="tools")
    made = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else kind_of(tool)
            message = f"`tools.{i}` is of the type {kind!r:.50}; only functions are possible"
            raise RequestError(message, param=f"tools.{i}")
        names = ("name", "description", "parameters")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        made.append({"type": "function", "function": function})
    return made


def _messages(items: Any) -> list[dict[str, Any]]:
    """Return messages of a text, or of the items of a conversation."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        got = "an empty one" if items == [] else kind_of(items)
        raise RequestError(f"`input` must be a text or a list of items, got {got}", param="input")
    made: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            made.append({"role": item.get("role"), "content": _content(item.get("content"), i)})
        elif kind == "function_call":
            call = {k: item.get(k) for k in ("name", "arguments")}
            named = {"id": item.get("call_id"), "type": "function", "function": call}
            # calls that follow each other, or a text, are of one answer
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": ""})
            made[-1].setdefault("tool_calls", []).append(named)
        elif kind == "function_call_output":
            output = _content(item.get("output"), i)
            made.append(
                {"role": "tool", "content": output, "tool_call_id": str(item.get("call_id"))}
            )
        else:
            message = f"`input.{i}` is {kind!r:.50}, expected a message, a call or its output"
            raise RequestError(message, param=f"input.{i}")
    return made


def _content(value: Any, i: int) -> Any:
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in (*_TEXTS, "input_image"):
            message = f"`input.{i}.content` has a part that is neither text nor `input_image`"
            raise RequestError(f"{message}; leave it out", param=f"input.{i}.content")
        if part.get("file_id") is not None:
            message = "`file_id` is not supported; send the image as a data URL"
            raise RequestError(message, param=f"input.{i}.content")
    return [
        part if part["type"] == "input_image" else {"type": "text", "text": part.get("text")}
        for part in value
    ]


def whole(exchange: ChatExchange) -> dict[str, Any]:
    """Return a response that is not streamed."""
    [one] = exchange.completions
    is_cut = responses.finish_reason(one) == "length"
    used = responses.usage([one])
    return _head(exchange) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(exchange, one),
        "usage": {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        },
    }


def _head(exchange: ChatExchange) -> dict[str, Any]:
    asked = exchange.asked
    assert isinstance(asked, ResponseRequest), "this API's requests"
    given = asked.given
    return {
        "id": exchange.id,
        "object": "response",
        "created_at": exchange.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": asked.metadata,
        "model": exchange.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous_id,
        "session_id": exchange.session_id,
        "store": asked.is_kept,
        "temperature": asked.temperature,
        "text": given.get("text") or {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "top_p": asked.top_p,
        "truncation": given.get("truncation") or "disabled",
        "usage": None,
    }


def _items(exchange: ChatExchange, one: Completion) -> list[dict[str, Any]]:
    """Return an answer as items: its text, unless it only calls tools, and its calls."""
    calls = one.answer.get("tool_calls") or []
    made = [_message(exchange, one)] if responses.content(one) or not calls else []
    return made + [_call(call) for call in calls]


def _message(exchange: ChatExchange, one: Completion) -> dict[str, Any]:
    found = responses.token_logprobs(one, exchange.token_text)
    logprobs = (found or []) if exchange.asked.wants_logprobs else []
    part = _part(responses.content(one)) | {"logprobs": logprobs}
    return _opened(exchange) | {"status": "completed", "content": [part]}


def _opened(exchange: ChatExchange) -> dict[str, Any]:
    made = {"id": f"msg_{exchange.id}", "type": "message", "role": "assistant"}
    return made | {"status": "in_progress", "content": []}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    made = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
    return made | {**call["function"], "status": "completed"}


class ResponseEvents:
    """The events of a streamed response."""

    def __init__(self, exchange: ChatExchange) -> None:
        self._exchange = exchange
        self._number, self._is_open = 0, False
        self._parts = MarkedParts()

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield that the response exists and is in progress."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=_head(self._exchange))

    def text(self, i: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield the next text; thoughts, like those of OpenAI's models, are not shown."""
        if shown := self._shown(text):
            yield from self._said(shown)

    def _said(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            self._is_open = True
            item = _opened(self._exchange)
            yield self._event("output_item.added", output_index=0, item=item)
            yield self._of_part("content_part.added", part=_part(""))
        yield self._of_part("output_text.delta", delta=text, logprobs=[])

    def end(
        self, completions: Sequence[Completion], left: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the rest of the text, the items as they are, and the whole response."""
        rest = self._shown(left[0])
        if rest or not completions[0].answer.get("tool_calls"):
            yield from self._said(rest)
        done = whole(self._exchange)
        for at, item in enumerate(done["output"]):
            yield from (self._text_done(item) if at == 0 and self._is_open else self._of(item, at))
            yield self._event("output_item.done", output_index=at, item=item)
        yield self._event(done["status"], response=done)

    def _shown(self, text: str) -> str:
        return "".join(part for is_thought, part in self._parts(text) if not is_thought)

    def _text_done(self, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        [part] = item["content"]
        text, logprobs = part["text"], part["logprobs"]
        yield self._of_part("output_text.done", text=text, logprobs=logprobs)
        yield self._of_part("content_part.done", part=part)

    def _of(self, item: Mapping[str, Any], at: int) -> Iterator[dict[str, Any]]:
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("output_item.added", output_index=at, item=begun)
        where = {"item_id": item["id"], "output_index": at}
        kind = "function_call_arguments"
        yield self._event(f"{kind}.delta", **where, delta=item["arguments"])
        yield self._event(f"{kind}.done", **where, name=item["name"], arguments=item["arguments"])

    def _of_part(self, kind: str, **values: Any) -> dict[str, Any]:
        where = {"item_id": f"msg_{self._exchange.id}", "output_index": 0, "content_index": 0}
        return self._event(kind, **where, **values)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **values}


def event(data: Mapping[str, Any] | str) -> bytes:
    """Return a server-sent event, whose name is its type."""
    kind = data.get("type", "error") if isinstance(data, Mapping) else "error"
    text = json.dumps(data, ensure_ascii=False)
    return f"event: {kind}\ndata: {text}\n\n".encode()
