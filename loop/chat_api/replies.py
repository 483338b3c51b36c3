"""A request and its response, sent whole or streamed while it is sampled."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse

from ..inference.token_stream import TokenStream
from . import responses
from .errors import RequestError
from .exchange import ChatExchange, Format
from .metrics import ServingMetrics
from .requests import for_header

_EVENTS = "text/event-stream"
PATIENCE_SECONDS = 10.0
"""After this long without a token, a stream sends a comment, so that clients do not time out."""

_log = logging.getLogger(__name__)


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
        chunks = exchange.format.chunks(exchange)
        end = chunks.end(exchange.completions, contents)
        made = _events(exchange.format, [*chunks.begin(), *end, *exchange.format.done])
        return Response(made, media_type=_EVENTS)
    return JSONResponse(exchange.format.whole(exchange))


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
        self._chunks = exchange.format.chunks(exchange)
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
        made = _events(self._exchange.format, message)
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
        made = _events(exchange.format, [*begin, *end, *exchange.format.done])
        self._seconds += time.perf_counter() - began + self._listener.seconds
        exchange.observe(self._metrics, self._seconds)
        return made

    def _broken(self, error: RequestError) -> bytes:
        self._metrics.broken.labels(str(error.status)).inc()
        return self._exchange.format.event(error.body)


def _events(form: Format, data: Iterable[dict[str, Any] | str]) -> bytes:
    return b"".join(map(form.event, data))
