"""Asking a language model behind an OpenAI-compatible address: bounded in time, size and number."""

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from ..store.errors import OperatorError, nearest
from .concurrency import at_most
from .import_path import import_from

Messages = Sequence[Mapping[str, Any]]
Ask = Callable[[Messages], Awaitable[str]]
"""What answers: an async function of messages that returns text."""

JudgeSpec = str | dict[str, Any]
"""Who answers: `package.module:function`, or the fields of an `Endpoint`."""

_LARGEST = 1 << 20
"""Bytes of a reply that are read."""
_LONGEST_WAIT = 30.0
"""Seconds before a request is repeated, whatever the server asks for."""


class NoAnswerError(RuntimeError):
    """A model gave no answer that can be read: it failed, refused, or said something else."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a model is asked, and how."""

    url: str
    """The address before `/chat/completions`, such as `http://127.0.0.1:8000/v1`."""
    model: str
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; without one, none is sent."""
    temperature: float = 0.0
    max_tokens: int = 1024
    seconds: float = 60.0
    """Longest time of one request."""
    retries: int = 3
    """Requests after the first, when the server is busy (429), fails (5xx) or is not reached."""
    wait: float = 0.5
    """Seconds before the first of them; each time twice as long, or as the server asks."""
    at_once: int = 8
    """Requests under way at once, whoever makes them."""

    async def ask(self, messages: Messages) -> str:
        """Return the model's reply; raises NoAnswerError with the reason when there is none."""
        async with at_most(self.at_once, of=self.url):
            again = 0
            while True:
                status, body, asked_for = await self._request(messages)
                if status == 200:
                    return _content(body)
                if again == self.retries or not (status in (0, 408, 429) or status >= 500):
                    break
                await asyncio.sleep(min(asked_for or self.wait * 2**again, _LONGEST_WAIT))
                again += 1
        tries = f" after {again + 1} requests" if again else ""
        what = f"HTTP {status}: " if status else ""
        raise NoAnswerError(f"{self.url} gave no answer{tries}: {what}{str(body)[:300]}")

    async def _request(self, messages: Messages) -> tuple[int, Any, float | None]:
        """Return the status (0 when it was not reached), the body, and the wait asked for."""
        import httpx

        key = os.environ.get(self.key_variable)
        sent = {
            "model": self.model,
            "messages": [dict(m) for m in messages],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        headers = {"Accept-Encoding": "identity"}  # or a small reply may become a large one
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            async with (
                asyncio.timeout(self.seconds),
                httpx.AsyncClient(verify=_trusted(), timeout=self.seconds) as client,
                client.stream(
                    "POST",
                    f"{self.url.rstrip('/')}/chat/completions",
                    json=sent,
                    headers=headers,
                ) as response,
            ):
                body = b""
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > _LARGEST:
                        raise NoAnswerError(f"{self.url} sent more than {_LARGEST} bytes")
                return response.status_code, _read(response, body), _wait(response)
        except TimeoutError:
            return 0, f"it took longer than {self.seconds:g} s", None
        except httpx.HTTPError as error:
            return 0, f"{type(error).__name__}: {error}", None


def chat_client(spec: JudgeSpec) -> Ask:
    """Return what answers: the function at `package.module:function`, or an endpoint's.

    >>> chat_client({"url": "http://127.0.0.1:8000/v1", "model": "judge"}).__name__
    'ask'

    Raises OperatorError for a field that an endpoint has not, or has otherwise.
    """
    if isinstance(spec, str):
        return cast(Ask, import_from(spec, "judge", error=OperatorError))
    known = Endpoint.__dataclass_fields__
    for name in spec:
        if name not in known:
            raise OperatorError(f"an endpoint has no `{name}`{nearest(name, known)}")
    try:
        return _endpoints().validate_python(spec).ask
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise OperatorError(f"the endpoint's `{place}`: {first['msg'].lower()}") from None


@cache
def _endpoints() -> TypeAdapter[Endpoint]:
    return TypeAdapter(Endpoint)


@cache
def _trusted() -> ssl.SSLContext:
    """To load the certificates takes longer than most requests."""
    return ssl.create_default_context()


def _read(response: Any, body: bytes) -> Any:
    import json

    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")


def _wait(response: Any) -> float | None:
    try:
        return max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:
        return None


def _content(body: Any) -> str:
    try:
        choice = body["choices"][0]
        message = dict(choice["message"])
    except (TypeError, ValueError, KeyError, IndexError):
        raise NoAnswerError(f"the reply is no chat completion: {str(body)[:300]}") from None
    if message.get("refusal"):
        raise NoAnswerError(f"it refused: {message['refusal']}")
    if choice.get("finish_reason") == "content_filter":
        raise NoAnswerError("it refused: the reply was filtered")
    if not message.get("content"):
        raise NoAnswerError(f"the reply is empty ({choice.get('finish_reason')})")
    return str(message["content"])
