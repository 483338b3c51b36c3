"""What chat endpoints stream: events become the answer that they are the pieces of."""

import json
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ..policy import PolicyError
from .responses import refusal, shown

LONGEST_LINE = 1 << 20
"""Most bytes of an event."""


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
    """The pieces of one streamed answer, without calls of tools.

    Token ids are kept where the endpoint says how many were sampled, and these are all: some
    servers' parsers swallow a few.

    >>> pieces = Pieces("an endpoint")
    >>> for content in ("4", "2"):
    ...     choice = {"delta": {"content": content}, "finish_reason": "stop"}
    ...     said = pieces.add(b"data: " + json.dumps({"choices": [choice]}).encode())
    >>> said, json.loads(pieces.whole())["choices"][0]["message"]["content"]
    ('2', '42')
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._said: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._rest: dict[str, Any] = {}
        self._token_ids: list[Any] | None = None
        self._logprobs: list[Any] | None = None
        self._sampled: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the answer has come to its end."""
        return "finish_reason" in self._rest

    def add(self, line: bytes) -> str:
        """Take a line of the stream; return what the answer's content goes on with.

        Raises PolicyError for what is no piece of a chat completion, or says that there is no more.
        """
        name, _, data = line.strip().partition(b":")
        data = data.strip()
        if name != b"data" or data == b"[DONE]":
            return ""
        try:
            event = _Event.model_validate_json(data)
        except ValidationError:
            raise PolicyError(
                f"`{self._engine}` streamed no chat completion, but {shown(data)}"
            ) from None
        if not event.choices and b'"error"' in data:
            message, reason = refusal(200, data)
            raise PolicyError(f"`{self._engine}` broke off: {message}", finish_reason=reason)
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
