"""Replies of chat endpoints: refusals on one line, and streams put together."""

import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ..store.errors import shorten

_SHOWN = 120


class NoAnswerError(RuntimeError):
    """A model gave no answer that can be read: the request failed, or the reply is invalid."""

    def __init__(self, message: str, *, finish_reason: str = "engine_error") -> None:
        super().__init__(message)
        self.finish_reason = finish_reason
        """`context_overflow` when the endpoint says so."""


class _Refusal(BaseModel):
    message: str = ""
    code: str | int | None = None


class _Refused(BaseModel):
    error: _Refusal | str


def refusal(status: int, body: bytes) -> tuple[str, str]:
    """Return what an error reply says, on one line, and the finish reason that it stands for."""
    try:
        error = _Refused.model_validate_json(body).error
        summary = _Refusal(message=error) if isinstance(error, str) else error
    except ValidationError:
        return f"{status}: {shown(body)}", "engine_error"
    text = " ".join(summary.message.split())
    is_long = summary.code == "context_length_exceeded" or "maximum context length" in text
    return f"{status}: {shorten(text)}", "context_overflow" if is_long else "engine_error"


def shown(body: bytes) -> str:
    """Return the beginning of a reply, for an error of one line."""
    text = " ".join(body[: 4 * _SHOWN].decode(errors="replace").split())
    return f"`{shorten(text, _SHOWN)}` ({len(body)} bytes)"


class _Delta(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None


class _Token(BaseModel):
    logprob: Any = None


class _Logprobs(BaseModel):
    content: list[_Token] | None = None


class _Choice(BaseModel):
    index: int = 0
    delta: _Delta = Field(default_factory=_Delta)
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[Any] | None = None
    prompt_token_ids: list[Any] | None = None


class _Usage(BaseModel):
    completion_tokens: int | None = None


class _Event(BaseModel):
    choices: list[_Choice] = Field(default_factory=list)
    prompt_token_ids: list[Any] | None = None
    usage: _Usage | None = None


class Pieces:
    """The pieces of one streamed answer, without tool calls; its content goes to a listener.

    Token ids are kept where the endpoint says how many were sampled, and these are all: some
    servers' parsers swallow a few.

    >>> on_text = []
    >>> pieces = Pieces("an endpoint", on_text.append)
    >>> for content in ("4", "2"):
    ...     choice = {"delta": {"content": content}, "finish_reason": "stop"}
    ...     pieces.add([b"data: " + json.dumps({"choices": [choice]}).encode()])
    >>> on_text, json.loads(pieces.whole())["choices"][0]["message"]["content"]
    (['4', '2'], '42')
    """

    def __init__(self, engine: str, on_text: Callable[[str], None]) -> None:
        self._engine, self._on_text = engine, on_text
        self.has_begun = False
        """Whether content was passed on."""
        self._said: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._rest: dict[str, Any] = {}
        self._token_ids: list[Any] | None = None
        self._logprobs: list[Any] | None = None
        self._sampled: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the answer has come to its end."""
        return "finish_reason" in self._rest

    def add(self, lines: list[bytes]) -> None:
        """Take lines of the stream, and pass their content on.

        Raises NoAnswerError for a line that is not a piece of a chat completion, or is an error.
        """
        if said := "".join(map(self._content, lines)):
            self.has_begun = True
            self._on_text(said)

    def _content(self, line: bytes) -> str:
        name, _, data = line.strip().partition(b":")
        data = data.strip()
        # Other fields, and comments that keep a connection alive, bring no text.
        if name != b"data" or data == b"[DONE]":
            return ""
        try:
            event = _Event.model_validate_json(data)
        except ValidationError:
            raise NoAnswerError(
                f"`{self._engine}` streamed no chat completion, but {shown(data)}"
            ) from None
        # the status was sent before the first piece, so a later error comes as a piece
        if not event.choices and b'"error"' in data:
            message, reason = refusal(200, data)
            raise NoAnswerError(f"`{self._engine}` broke off: {message}", finish_reason=reason)
        self._keep("prompt_token_ids", event.prompt_token_ids)
        if event.usage is not None:
            self._sampled = event.usage.completion_tokens
        return "".join(self._add(choice) for choice in event.choices if choice.index == 0)

    def whole(self) -> bytes:
        """Return the body of the answer, had it not been streamed."""
        message = {name: "".join(parts) for name, parts in self._said.items() if parts}
        choice = {"message": message, **self._rest}
        if self._token_ids is not None and len(self._token_ids) == self._sampled:
            given = self._logprobs and {"content": self._logprobs}
            choice |= {"token_ids": self._token_ids, "logprobs": given}
        return json.dumps({"choices": [choice]}).encode()

    def _add(self, choice: _Choice) -> str:
        self._keep("finish_reason", choice.finish_reason)
        self._keep("prompt_token_ids", choice.prompt_token_ids)
        if choice.token_ids is not None:
            self._token_ids = self._token_ids or []
            self._token_ids += choice.token_ids
        if choice.logprobs is not None and choice.logprobs.content is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += [{"logprob": token.logprob} for token in choice.logprobs.content]
        for name, parts in self._said.items():
            if said := getattr(choice.delta, name):
                parts.append(said)
        return choice.delta.content or ""

    def _keep(self, name: str, value: Any) -> None:
        if value is not None:
            self._rest[name] = value
