"""A request and its response, sent whole or streamed while it is sampled."""

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
from .metrics import ServingMetrics
from .requests import ChatRequest, for_header
from .sessions import new_key

_EVENTS = "text/event-stream"
PATIENCE_SECONDS = 10.0
"""After this long without a token, a stream sends a comment, so that clients do not time out."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ChatExchange:
    """A request and its answer so far."""

    asked: ChatRequest
    model: str
    token_text: responses.TokenText
    nbytes: int
    """The size of the request's body."""
    began: float
    listener: TokenStream | None = None
    """Receives the answer while it is sampled; None if it is sent whole."""
    id: str = field(default_factory=lambda: f"chatcmpl-{new_key()}")
    created: int = field(default_factory=lambda: int(time.time()))
    session_id: str = ""
    """The name of its session, once it is being answered."""
    completions: list[Completion] = field(default_factory=list)
    """The completions that are recorded."""
    left: list[str] = field(default_factory=list)
    """The rest of each text that was not streamed during sampling."""
    engine_seconds: float = 0.0
    recorded: float = 0.0
    """When they were recorded, by `perf_counter`; 0 before."""

    def sampled(self, completions: list[Completion]) -> None:
        """Set the completions; raise RequestError if a different text was already streamed."""
        self.completions = completions
        contents = [responses.content(one) for one in completions]
        try:
            self.left = contents if self.listener is None else self.listener.left(contents)
        except PolicyError as error:
            raise RequestError(str(error), status=500) from error

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that all responses of a kind begin with."""
        made = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return made | {"session_id": self.session_id}

    def chunks(self) -> responses.Chunks:
        """Return the builder of the streamed chunks."""
        return responses.Chunks(self.head("chat.completion.chunk"), self.asked, self.token_text)

    def observe(self, metrics: ServingMetrics, seconds: float) -> float:
        """Record the total time, and record and return the server's overhead.

        The overhead is the time until recording, without the engine's time, plus `seconds` for
        encoding the response. How fast a client reads does not count.
        """
        overhead = max(0.0, self.recorded - self.began - self.engine_seconds) + seconds
        metrics.seconds.observe(time.perf_counter() - self.began)
        metrics.overhead.observe(overhead)
        return overhead


def whole(exchange: ChatExchange, metrics: ServingMetrics) -> Response:
    """Return a complete answer as a response."""
    made = _whole(exchange)
    overhead = exchange.observe(metrics, time.perf_counter() - exchange.recorded)
    made.headers["x-rlake-overhead-ms"] = f"{1000 * overhead:.3f}"
    made.headers["X-Session-Id"] = for_header(exchange.session_id)
    return made


def _whole(exchange: ChatExchange) -> Response:
    if exchange.asked.is_streamed:
        contents = [responses.content(one) for one in exchange.completions]
        chunks = exchange.chunks()
        end = chunks.end(exchange.completions, contents)
        return Response(_events([*chunks.begin(), *end, "[DONE]"]), media_type=_EVENTS)
    head = exchange.head("chat.completion")
    return JSONResponse(
        responses.response(head, exchange.asked, exchange.completions, exchange.token_text)
    )


class Stream(StreamingResponse):
    """A response that is sent while it is sampled.

    The last chunk follows recording. An earlier error is sent as the final event, since the status
    was already sent. Sampling is cancelled if the client disconnects.
    """

    def __init__(
        self,
        exchange: ChatExchange,
        listener: TokenStream,
        work: "asyncio.Task[None]",
        metrics: ServingMetrics,
        ended: Callable[[], None],
    ) -> None:
        """Stream the result of `work`; `ended` is called after the last byte."""
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
        # Without it, the end of the work would be noticed only after PATIENCE_SECONDS.
        work.add_done_callback(lambda _: listener.wake())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # the client is gone: nobody reads what is sampled from here on
            if not self._work.done():
                self._metrics.left.inc()
                self._work.cancel()
            self._ended()

    async def _sent(self) -> AsyncIterator[bytes]:
        now = asyncio.get_running_loop().time
        silent = now()
        while not self._work.done():
            if message := self._new_events():
                yield message
                silent = now()
            try:
                async with asyncio.timeout_at(silent + PATIENCE_SECONDS):
                    await self._listener.changed()
            except TimeoutError:
                # A comment in the protocol, which clients skip; without any byte,
                # proxies close the connection.
                yield b": still at it\n\n"
                silent = now()
        yield self._new_events() + self._end()

    def _new_events(self) -> bytes:
        began = time.perf_counter()
        message: list[dict[str, Any]] = []
        if self._listener.is_begun and not self._is_begun:
            self._is_begun = True
            message += self._chunks.begin()
        for i, text in self._listener.take():
            message += self._chunks.text(i, text)
        made = _events(message)
        self._seconds += time.perf_counter() - began
        return made

    def _end(self) -> bytes:
        """Return the final events: the rest of the answer, or the error."""
        try:
            self._work.result()
        except RequestError as error:
            return self._broken(error)
        except Exception:  # noqa: BLE001 - the status is already sent
            _log.exception("an answer broke off")
            return self._broken(RequestError("the server failed; its log says why", status=500))
        exchange, began = self._exchange, time.perf_counter()
        begin = () if self._is_begun else self._chunks.begin()
        end = self._chunks.end(exchange.completions, exchange.left)
        made = _events([*begin, *end, "[DONE]"])
        self._seconds += time.perf_counter() - began + self._listener.seconds
        exchange.observe(self._metrics, self._seconds)
        return made

    def _broken(self, error: RequestError) -> bytes:
        self._metrics.broken.labels(str(error.status)).inc()
        return responses.event(error.body)


def _events(data: Iterable[dict[str, Any] | str]) -> bytes:
    return b"".join(map(responses.event, data))
