"""A policy that is asked over HTTP: anything that answers OpenAI's chat API."""

import asyncio
import os
import random
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import perf_counter
from typing import Any

import httpx

from ....store.errors import ConfigError
from ....store.records import Message
from ...config import Endpoint
from ..background import run_on, shared_loop
from ..policy import Completion, PolicyError, Sampling, Timing, Turn
from ..token_stream import TokenCallback, current_callbacks
from .events import LONGEST_LINE, Pieces
from .responses import completion, refusal, shown

LARGEST_ANSWER = 8 << 20
"""Most bytes of an answer that are read."""
LARGEST_STREAM = 64 << 20
"""Most bytes of the events that an answer is streamed in."""
LONGEST_WAIT = 60.0
"""Most seconds between two tries of a request; an endpoint that asks for more is given up."""
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_CONNECT_SECONDS = 10.0
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""Statuses of what may go well when it is tried again."""


class EndpointPolicy:
    """Another's model, asked message by message; it has no version that is ours.

    Rows have token ids only where the endpoint gives them (rlake's own server does; vLLM's with
    `options: {return_token_ids: true}`), and log-probs only where these are of the full
    distribution at the sampling temperature. Those without are text: to be imitated, judged or
    compared, not weighed against the policy.

    Requests that are refused for now (429, 5xx), or find nobody, are sent again after a while,
    twice as long each time, or as long as `Retry-After` says. What else goes wrong is a PolicyError
    at once. An answer without tools that somebody hears is asked for as a stream; one that breaks
    off when a part of it was told is not asked for again.
    """

    version: int | None = None
    """No weights of ours."""

    def __init__(
        self, settings: Endpoint, *, sampling: Sampling | None = None, first_wait: float = 0.5
    ) -> None:
        """Ask the endpoint of `settings`; `first_wait` seconds pass before a second try."""
        self.settings, self.sampling = settings, sampling or Sampling()
        self.engine = _address(settings.url)
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._first_wait = first_wait
        self._places = asyncio.Semaphore(settings.max_concurrency)
        self._client = httpx.AsyncClient(
            headers=_headers(settings),
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=settings.max_concurrency),
        )
        self._closing = weakref.finalize(self, _close, self._client)

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        sampling: Sampling | None = None,
        earlier: Sequence[Turn] = (),
    ) -> list[Completion]:
        """Return `n` answers, each asked for by a request of its own; who listens hears them.

        Raises PolicyError: `context_overflow` when the endpoint says so, else `engine_error`.
        """
        chosen = sampling or self.sampling
        bodies = [self._body(messages, tools, chosen, i) for i in range(n)]
        heard = [None] * n if tools else current_callbacks(["".join] * n)
        asked = [
            asyncio.ensure_future(run_on(self._ask(body, hears, _sampled_so(chosen, body))))
            for body, hears in zip(bodies, heard, strict=True)
        ]
        try:
            return list(await asyncio.gather(*asked))
        finally:
            for one in asked:
                one.cancel()

    def close(self) -> None:
        """Close what connections are kept open."""
        self._closing()

    def _body(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        sampling: Sampling,
        number: int,
    ) -> dict[str, Any]:
        body = {
            "model": self.settings.model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": (sampling.seed + number) % (1 << 31),
            "logprobs": True,
            "top_k": sampling.top_k or None,  # OpenAI's own refuses these
            "min_p": sampling.min_p or None,
            "stop": list(sampling.stop) or None,
            "tools": list(tools) if tools else None,
        }
        body |= self.settings.extra_body
        return {name: value for name, value in body.items() if value is not None}

    async def _ask(
        self, body: Mapping[str, Any], heard: TokenCallback | None, sampling: Sampling
    ) -> Completion:
        asked = perf_counter()
        async with self._places:
            sent = perf_counter()
            telling = None if heard is None else _Telling(heard)
            answer = await self._answer(body, telling)
            now = perf_counter()
        first = telling.first if telling else None
        timing = Timing(
            queued=sent - asked, first_token=first - sent if first else 0.0, total=now - asked
        )
        keeps = _gives_full(sampling, processed=self.settings.processed_logprobs)
        made = completion(answer, engine=self.engine, keeps_logprobs=keeps, timing=timing)
        return replace(made, sampling=sampling)

    async def _answer(self, body: Mapping[str, Any], telling: "_Telling | None") -> bytes:
        """Return the body of an answer, asking again where that may help."""
        tries = self.settings.max_retries + 1
        for number in range(tries):
            try:
                return await self._once(body, telling)
            except _NotNowError as error:
                if telling is not None and telling.first is not None:
                    raise PolicyError(f"`{self.engine}` {error}, in the midst of it") from None
                backed_off = self._first_wait * 2**number * random.uniform(0.5, 1.0)
                wait = min(backed_off, LONGEST_WAIT) if error.wait is None else error.wait
                if number + 1 == tries or wait > LONGEST_WAIT:
                    asks = f", asks to wait {wait:.0f} s" if wait > LONGEST_WAIT else ""
                    raise PolicyError(
                        f"`{self.engine}` {error}{asks}; tried {number + 1} times"
                    ) from None
                await asyncio.sleep(wait)
        raise AssertionError("a request is tried at least once")

    async def _once(self, body: Mapping[str, Any], telling: "_Telling | None") -> bytes:
        seconds = self.settings.timeout
        asked = body if telling is None else {**body, **_STREAMED}
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.stream("POST", self._url, json=asked) as response,
            ):
                is_streamed = "text/event-stream" in response.headers.get("content-type", "")
                if telling is not None and response.is_success and is_streamed:
                    answer = await self._listen(response, telling)
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
        raise PolicyError(f"`{self.engine}` answers {message}", finish_reason=reason)

    async def _listen(self, response: httpx.Response, telling: "_Telling") -> bytes:
        """Return the body of an answer that is streamed, and tell its content as it comes."""
        pieces, line, size = Pieces(self.engine), b"", 0
        async for chunk in response.aiter_raw():  # as they come
            *lines, line = (line + chunk).split(b"\n")
            size += len(chunk)
            if size > LARGEST_STREAM or len(line) > LONGEST_LINE:
                raise PolicyError(f"`{self.engine}` streams without end: {shown(line)}")
            if said := "".join(map(pieces.add, lines)):
                telling(said)
        if not pieces.is_whole:
            raise _NotNowError("ended its answer before the end")
        return pieces.whole()

    async def _read(self, response: httpx.Response) -> bytes:
        """Return a body, which is not compressed, as far as one is taken."""
        answer = bytearray()
        async for chunk in response.aiter_raw(1 << 16):
            answer += chunk
            if len(answer) > LARGEST_ANSWER:
                raise PolicyError(
                    f"`{self.engine}` answers with more than {LARGEST_ANSWER} bytes: "
                    f"{shown(bytes(answer))}"
                )
        return bytes(answer)


class _Telling:
    """Who hears an answer, and when the first of it was told."""

    def __init__(self, heard: TokenCallback) -> None:
        self._heard = heard
        self.first: float | None = None

    def __call__(self, text: str) -> None:
        self.first = self.first or perf_counter()
        self._heard(text)


@dataclass
class _NotNowError(Exception):
    """A request failed in a way that may pass."""

    why: str
    wait: float | None = None
    """Seconds until it may be tried again, where the endpoint says it."""

    def __str__(self) -> str:
        return self.why


def _gives_full(sampling: Sampling, *, processed: bool) -> bool:
    """Tell whether an endpoint's log-probs are of the full distribution at the temperature.

    Processed ones are of what truncation leaves, others of the model's own, at temperature 1.
    """
    return not sampling.is_truncated if processed else sampling.temperature in (0.0, 1.0)


def _sampled_so(sampling: Sampling, body: Mapping[str, Any]) -> Sampling:
    """Return how a body asks to be sampled, in which options may stand before `sampling`."""
    names = ("temperature", "top_p", "top_k", "min_p")
    asked = {name: body[name] for name in names if isinstance(body.get(name), int | float)}
    return replace(Sampling(max_tokens=sampling.max_tokens, stop=sampling.stop), **asked)


def _headers(settings: Endpoint) -> dict[str, str]:
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"the key in the environment's `{settings.api_key_env}` is no plain text")
    return {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})


def _address(url: str) -> str:
    """Return a URL without what may be secret in it."""
    parts = httpx.URL(url)
    return str(parts.copy_with(userinfo=b"", query=None, fragment=None)).rstrip("/")


def _retry_after(response: httpx.Response) -> float | None:
    message = response.headers.get("retry-after", "").strip()
    if message.replace(".", "", 1).isdecimal():
        return float(message)
    try:
        at = parsedate_to_datetime(message)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def _close(client: httpx.AsyncClient) -> None:
    asyncio.run_coroutine_threadsafe(client.aclose(), shared_loop())
