"""One request and what it comes to, sent whole, or piece by piece while it is sampled."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse

from ..inference.policy import Completion, PolicyError
from ..inference.token_stream import TokenStream
from . import responses
from .errors import RequestError
from .header_values import for_header
from .metrics import ServingMetrics
from .requests import Asked
from .sessions import new_key

PATIENCE_SECONDS = 10.0
"""A streamed answer that says nothing for longer sends a comment, so that nobody hangs up."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ChatExchange:
    """One request, and what is known of its answer so far."""

    asked: Asked
    model: str
    token_text: responses.TokenText
    nbytes: int
    """Of the request's body."""
    began: float
    listener: TokenStream | None = None
    """Hears the answer while it is sampled; None: it is sent whole."""
    id: str = field(default_factory=lambda: f"chatcmpl-{new_key()}")
    created: int = field(default_factory=lambda: int(time.time()))
    session_id: str = ""
    """The name of its session, from when it is worked on."""
    completions: list[Completion] = field(default_factory=list)
    """What is recorded."""
    left: list[str] = field(default_factory=list)
    """What was not told of their contents while they were sampled."""
    engine_seconds: float = 0.0
    recorded: float = 0.0
    """When they were recorded, as perf_counter says it."""

    def sampled(self, completions: list[Completion]) -> None:
        """Take what is to be recorded; RequestError when something else was told of it."""
        self.completions = completions
        contents = [responses.content(one) for one in completions]
        try:
            self.left = contents if self.listener is None else self.listener.left(contents)
        except PolicyError as error:
            raise RequestError(str(error), status=500) from error

    def chunks(self) -> responses.Chunks:
        """Return what makes the pieces of its answer."""
        return responses.Chunks(
            self.id, self.created, self.asked, self.model, session_id=self.session_id
        )

    def observe(self, metrics: ServingMetrics, seconds: float) -> float:
        """Note how long it took, so many seconds of them to make its answer; return our share.

        Of a streamed answer that is the time until it was recorded that the engine did not take,
        and what its pieces took to make: how fast a client reads is none of our doing.
        """
        overhead = max(0.0, self.recorded - self.began - self.engine_seconds) + seconds
        metrics.seconds.observe(time.perf_counter() - self.began)
        metrics.overhead.observe(overhead)
        return overhead


def whole(exchange: ChatExchange, metrics: ServingMetrics) -> Response:
    """Return an answer that is there."""
    made = _whole(exchange)
    overhead = exchange.observe(metrics, time.perf_counter() - exchange.recorded)
    made.headers["x-rlake-overhead-ms"] = f"{1000 * overhead:.3f}"
    made.headers["X-Session-Id"] = for_header(exchange.session_id)
    return made


def _whole(exchange: ChatExchange) -> Response:
    texts = exchange.token_text
    if exchange.asked.is_streamed:
        contents = [responses.content(one) for one in exchange.completions]
        chunks = exchange.chunks()
        end = chunks.end(exchange.completions, contents, token_text=texts)
        return Response(_events([*chunks.begin(), *end, "[DONE]"]), media_type=_EVENTS)
    message = responses.response(
        exchange.id,
        exchange.created,
        exchange.asked,
        exchange.model,
        exchange.completions,
        token_text=texts,
        session_id=exchange.session_id,
    )
    return JSONResponse(message)


class Stream(StreamingResponse):
    """An answer that is sent while it is sampled.

    Its last piece comes when it is recorded. What goes wrong before is told as an event, since
    there is a status already, and nothing follows it. When the client goes away, it is given up.
    """

    def __init__(
        self,
        exchange: ChatExchange,
        listener: TokenStream,
        work: "asyncio.Task[None]",
        metrics: ServingMetrics,
        ended: Callable[[], None],
    ) -> None:
        """Send what `work` comes to; `ended` is called when nothing more is sent."""
        super().__init__(
            self._sent(),
            media_type=_EVENTS,
            headers={"X-Session-Id": for_header(exchange.session_id)},
        )
        self._exchange, self._listener, self._work = exchange, listener, work
        self._metrics, self._ended = metrics, ended
        self._chunks = exchange.chunks()
        self._is_begun = False
        self._seconds = 0.0
        work.add_done_callback(lambda _: listener.wake())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._work.done():
                self._metrics.left.inc()
                self._work.cancel()
            self._ended()

    async def _sent(self) -> AsyncIterator[bytes]:
        now = asyncio.get_running_loop().time
        silent = now()
        while not self._work.done():
            if message := self._told():
                yield message
                silent = now()
            try:
                async with asyncio.timeout_at(silent + PATIENCE_SECONDS):
                    await self._listener.changed()
            except TimeoutError:
                yield b": still at it\n\n"
                silent = now()
        yield self._told() + self._end()

    def _told(self) -> bytes:
        """Return what was sampled since this was last asked."""
        began = time.perf_counter()
        message: list[dict[str, Any]] = []
        if self._listener.is_begun and not self._is_begun:
            self._is_begun = True
            message += self._chunks.begin()
        for i, text in self._listener.take():
            message += self._chunks.said(i, text)
        made = _events(message)
        self._seconds += time.perf_counter() - began
        return made

    def _end(self) -> bytes:
        """Return what stands at the end: the rest, or why there is none."""
        try:
            self._work.result()
        except RequestError as error:
            return self._broken(error)
        except Exception:  # noqa: BLE001 - a stream can only tell it
            _log.exception("an answer broke off")
            return self._broken(RequestError("the server failed; its log says why", status=500))
        exchange, began = self._exchange, time.perf_counter()
        begin = () if self._is_begun else self._chunks.begin()
        end = self._chunks.end(exchange.completions, exchange.left, token_text=exchange.token_text)
        made = _events([*begin, *end, "[DONE]"])
        self._seconds += time.perf_counter() - began + self._listener.seconds
        exchange.observe(self._metrics, self._seconds)
        return made

    def _broken(self, error: RequestError) -> bytes:
        self._metrics.broken.labels(str(error.status)).inc()
        return responses.event(error.body)


_EVENTS = "text/event-stream"


def _events(told: Iterable[dict[str, Any] | str]) -> bytes:
    return b"".join(map(responses.event, told))
