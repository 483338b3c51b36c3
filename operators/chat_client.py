"""Models that answer messages with text: an async function, or a chat endpoint."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from pydantic import Field, ValidationError

from ..store.errors import OperatorError, first_invalid, nearest
from .concurrency import shared_semaphore
from .endpoint import Endpoint, EndpointClient
from .endpoint_replies import NoAnswerError, shown
from .import_path import import_from

Messages = Sequence[Mapping[str, Any]]
Ask = Callable[[Messages], Awaitable[str]]
"""What answers: an async function of messages that returns text."""

JudgeSpec = str | dict[str, Any]
"""Which model answers: `package.module:function`, or the fields of a `JudgeEndpoint`."""

_FORMER = {
    "at_once": "max_concurrency",
    "key_variable": "api_key_env",
    "retries": "max_retries",
    "seconds": "timeout",
}


class JudgeEndpoint(Endpoint):
    """An endpoint that is asked for one reply at a time."""

    temperature: float = Field(default=0.0, ge=0, strict=True)
    max_tokens: int = Field(default=1024, ge=1, strict=True)

    async def ask(self, messages: Messages) -> str:
        """Return the model's reply; raises NoAnswerError with the reason when there is none."""
        body = self.body(
            messages=[dict(message) for message in messages],
            temperature=self.temperature,
            max_tokens=self.max_tokens,
        )
        # a client for each call: operators run each batch in an event loop of its own
        async with shared_semaphore(self.url, self.max_concurrency), EndpointClient(self) as client:
            return _content(await client.complete(body), client.name)


def chat_client(spec: JudgeSpec) -> Ask:
    """Return what answers: the function at `package.module:function`, or an endpoint's.

    >>> chat_client({"url": "http://127.0.0.1:8000/v1", "model": "judge"}).__name__
    'ask'

    Raises OperatorError for a field that is unknown or has an invalid value.
    """
    if isinstance(spec, str):
        return cast(Ask, import_from(spec, "judge", error=OperatorError))
    known = JudgeEndpoint.model_fields
    for name in spec:
        if name not in known:
            now = _FORMER.get(name)
            hint = f"; it is called `{now}`" if now else nearest(name, known)
            raise OperatorError(f"an endpoint has no `{name}`{hint}")
    try:
        return JudgeEndpoint.model_validate(spec).ask
    except ValidationError as error:
        place, message, _ = first_invalid(error)
        raise OperatorError(f"the endpoint's `{place}`: {message}") from None


def _content(body: bytes, name: str) -> str:
    try:
        choice = json.loads(body)["choices"][0]
        message = dict(choice["message"])
    except (TypeError, ValueError, KeyError, IndexError, RecursionError):
        raise NoAnswerError(f"`{name}` gave no chat completion, but {shown(body)}") from None
    if message.get("refusal"):
        raise NoAnswerError(f"`{name}` refused: {message['refusal']}")
    if choice.get("finish_reason") == "content_filter":
        raise NoAnswerError(f"`{name}` refused: the reply was filtered")
    if not message.get("content"):
        raise NoAnswerError(f"`{name}` gave an empty reply ({choice.get('finish_reason')})")
    return str(message["content"])
