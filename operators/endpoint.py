"""Endpoints that speak OpenAI's chat API: their settings, and a client with retries and limits.

The package `openai` is not used here: its client limits neither the bytes of a reply nor the time
of a whole request, takes five times as long to import, and brings a second HTTP library.
"""

import asyncio
import ipaddress
import os
import random
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..store.errors import ConfigError
from .endpoint_replies import NoAnswerError, Pieces, refusal, shown

if TYPE_CHECKING:
    import httpx

LARGEST_ANSWER = 8 << 20
"""Most bytes of a reply that are read."""
LARGEST_STREAM = 64 << 20
"""Most bytes of the events that a reply is streamed in."""
LONGEST_LINE = 1 << 20
"""Most bytes of one event."""
LONGEST_WAIT = 60.0
"""Most seconds between two attempts; an endpoint that asks for more is given up."""
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_CONNECT_SECONDS = 10.0
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""Statuses of requests that may succeed when they are sent again."""


def is_loopback(host: str) -> bool:
    """Return whether a host is the loopback interface of this machine.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Endpoint(BaseModel):
    """Where a model is asked over OpenAI's chat API, and how."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    url: str
    """Base URL before `/chat/completions`, such as `https://host/v1`."""
    model: str
    """Name of the model at the endpoint."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; if it is not set, no key is sent."""
    timeout: float = Field(default=120.0, gt=0, strict=True)
    """Timeout of one request, in seconds; each retry has the same time again."""
    max_retries: int = Field(default=4, ge=0, strict=True)
    """Retries of a request that was refused temporarily or failed to connect."""
    max_concurrency: int = Field(default=32, ge=1, strict=True)
    """Requests in flight at once."""
    extra_body: dict[str, Any] = Field(default={})
    """Keys added to each request's body, unchanged; null removes a key.

    `{return_token_ids: true}` asks vLLM for token ids; `{logprobs: null}` is for endpoints that
    refuse to give any.
    """

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"must be an address as `https://host/v1`, got {url!r}")
        if url.rstrip("/").endswith("/chat/completions"):
            raise ValueError("must be what stands before `/chat/completions`")
        return url

    def body(self, **given: Any) -> dict[str, Any]:
        """Return the body of a request: what is given, the model, and `extra_body`, without nulls.

        >>> Endpoint(url="http://h/v1", model="m", extra_body={"n": 2, "seed": None}).body(seed=1)
        {'model': 'm', 'n': 2}
        """
        made = {"model": self.model, **given, **self.extra_body}
        return {name: value for name, value in made.items() if value is not None}


class EndpointClient:
    """A client of one endpoint; it belongs to the event loop that it is first used in.

    Requests that are refused temporarily (429, 5xx) or fail to connect are sent again, after a wait
    that doubles each time, or that `Retry-After` sets. Any other failure raises NoAnswerError at
    once. A streamed reply that breaks off after text was passed on is not requested again.
    """

    def __init__(self, settings: Endpoint, *, first_wait: float = 0.5) -> None:
        """Connect with these settings; `first_wait` seconds pass before the first retry."""
        import httpx

        self.settings = settings
        url = httpx.URL(settings.url)
        # the name goes into messages and rows, so it must not hold secrets of the URL
        public = url.copy_with(userinfo=b"", query=None, fragment=None)
        self.name = str(public).rstrip("/")
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._first_wait = first_wait
        self._http = httpx.AsyncClient(
            headers=_headers(settings),
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=settings.max_concurrency),
            verify=_certificates(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close connections that are kept open."""
        await self._http.aclose()

    async def complete(
        self, body: Mapping[str, Any], *, on_text: Callable[[str], None] | None = None
    ) -> bytes:
        """Return the body of a chat completion; `on_text` gets its content while it is sampled.

        Raises NoAnswerError.
        """
        attempts = self.settings.max_retries + 1
        for number in range(attempts):
            pieces = None if on_text is None else Pieces(self.name, on_text)
            try:
                return await self._once(body, pieces)
            except _NotNowError as error:
                if pieces is not None and pieces.has_begun:
                    raise NoAnswerError(f"`{self.name}` {error}, in the midst of it") from None
                # random, so that clients that were refused together do not come back together
                backed_off = self._first_wait * 2**number * random.uniform(0.5, 1.0)
                wait = min(backed_off, LONGEST_WAIT) if error.wait is None else error.wait
                if number + 1 == attempts or wait > LONGEST_WAIT:
                    asks = f", asks to wait {wait:.0f} s" if wait > LONGEST_WAIT else ""
                    message = f"`{self.name}` {error}{asks}; tried {number + 1} times"
                    raise NoAnswerError(message) from None
                await asyncio.sleep(wait)
        raise AssertionError("a request is tried at least once")

    async def _once(self, body: Mapping[str, Any], pieces: Pieces | None) -> bytes:
        import httpx

        seconds = self.settings.timeout
        sent = body if pieces is None else {**body, **_STREAMED}
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream("POST", self._url, json=sent) as response,
            ):
                is_streamed = "text/event-stream" in response.headers.get("content-type", "")
                if pieces is not None and response.is_success and is_streamed:
                    answer = await self._listen(response, pieces)
                else:
                    answer = await self._read(response)
        except TimeoutError:
            raise _NotNowError(f"did not answer within {seconds:g} s") from None
        except httpx.TransportError as error:
            message = str(error) or type(error).__name__
            raise _NotNowError(f"cannot be reached: {message[:200]}") from None
        if response.is_success:
            return answer
        message, reason = refusal(response.status_code, answer)
        if response.status_code in _AGAIN:
            raise _NotNowError(f"answers {message}", _retry_after(response))
        if response.status_code in (401, 403):
            message += f"; its key is taken from the environment's `{self.settings.api_key_env}`"
        raise NoAnswerError(f"`{self.name}` answers {message}", finish_reason=reason)

    async def _listen(self, response: "httpx.Response", pieces: Pieces) -> bytes:
        """Return the body of a reply that is streamed."""
        line, size = b"", 0
        # by hand, since line iterators buffer a line without end, which a limit cannot stop
        async for chunk in response.aiter_raw():
            *lines, line = (line + chunk).split(b"\n")
            size += len(chunk)
            if size > LARGEST_STREAM or len(line) > LONGEST_LINE:
                raise NoAnswerError(f"`{self.name}` streams without end: {shown(line)}")
            pieces.add(lines)
        if not pieces.is_whole:
            raise _NotNowError("ended its answer before the end")
        return pieces.whole()

    async def _read(self, response: "httpx.Response") -> bytes:
        """Return the body of a reply; the header that we send keeps it from being compressed."""
        answer = bytearray()
        async for chunk in response.aiter_raw(1 << 16):
            answer += chunk
            if len(answer) > LARGEST_ANSWER:
                raise NoAnswerError(
                    f"`{self.name}` answers with more than {LARGEST_ANSWER} bytes: "
                    f"{shown(bytes(answer))}"
                )
        return bytes(answer)


@dataclass
class _NotNowError(Exception):
    """A request failed in a way that may pass."""

    why: str
    wait: float | None = None
    """Seconds until it may be sent again, where the endpoint says so."""

    def __str__(self) -> str:
        return self.why


def _headers(settings: Endpoint) -> dict[str, str]:
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"the key in the environment's `{settings.api_key_env}` is not plain text"
        )
    # a small compressed reply may become a large one, and the limit counts bytes as received
    return {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})


@cache
def _certificates() -> ssl.SSLContext:
    import httpx

    # once: loading the certificates takes longer than most requests

    return httpx.create_ssl_context()


def _retry_after(response: "httpx.Response") -> float | None:
    message = response.headers.get("retry-after", "").strip()
    if message.replace(".", "", 1).isdecimal():
        return float(message)
    try:
        at = parsedate_to_datetime(message)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
