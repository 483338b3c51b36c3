"""What is watched: read once, and sent to all browsers that watch the same, as one message."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from fastapi import WebSocket
from nicegui.element import Element

from ...store.errors import RlakeError
from .frame import Studio, notify_error

_log = logging.getLogger(__name__)
SECONDS = 0.9
"""How often it is looked for news while somebody watches, in seconds."""
_RETRY_SECONDS = 15.0
"""When a redraw that failed is tried again, in seconds: its error is shown so long."""
_WAITING = 64
"""Messages that may wait for a browser: one that falls behind is cut off, and comes again."""
Message = dict[str, Any]


class Source(Protocol):
    """What browsers of one address watch."""

    async def news(self) -> Message:
        """Return what is new since the last call; empty where nothing is."""
        ...

    def whole(self) -> Message:
        """Return all that is known, for a browser that comes now."""
        ...


WATCHED: dict[str, Callable[[Studio, dict[str, str]], Source]] = {}
"""What a page's script may watch, by the path of its websocket."""


class Watch(Element, component="watch.js"):
    """What a page watches: it changes the charts or the grid of the page, and shows a state."""

    def __init__(self, address: str, redraw: Callable[[], Awaitable[None]]) -> None:
        """Watch an address; `redraw` is called when there are other curves, or more rows."""
        super().__init__()
        self._address = address
        self.props.update({"address": "", "drawn": [], "times": 0, "state": None})
        self._redraw = redraw
        self.on("redraw", self.redraw, args=[])

    async def redraw(self) -> None:
        """Draw the page's charts or grid again; an error is shown, and it is tried again."""
        try:
            await self._redraw()
        except RlakeError as error:
            notify_error(error)
            self.run_method("again", _RETRY_SECONDS)

    def drew(self, what: Sequence[Any]) -> None:
        """Say which curves, or rows, are on the page; the first time, begin to watch."""
        # counted, for the script must know of one that drew the same too
        times = self.props["times"] + 1
        self.props.update({"address": self._address, "drawn": list(what), "times": times})
        self.update()


class Channel:
    """The browsers that watch one source, and the task that tells them."""

    def __init__(self, source: Source) -> None:
        self.browsers: set[asyncio.Queue[str | None]] = set()
        self._source, self._last, self._failed = source, "", False
        self.task = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        while True:
            try:
                message = await self._source.news()
                if self._failed:
                    message = {"error": ""} | message
            except RlakeError as error:  # a store that is being restored comes back
                message = {"error": str(error)}
            except Exception as error:  # the boundary of a page: the others go on
                _log.exception("what browsers watch")
                self._send({"error": f"this page stopped: {type(error).__name__}: {error}"})
                raise
            self._send(message)
            await asyncio.sleep(SECONDS)

    def _send(self, message: Message) -> None:
        text = json.dumps(message)
        if not message or text == self._last:
            return
        self._last, self._failed = text, bool(message.get("error"))
        for queue in self.browsers:
            try:
                queue.put_nowait(text)
            except asyncio.QueueFull:
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)

    def enter(self) -> "asyncio.Queue[str | None]":
        """Return the messages for a browser that comes now."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(_WAITING)
        if whole := self._source.whole():
            queue.put_nowait(json.dumps(whole))
        if self._failed:
            queue.put_nowait(self._last)
        self.browsers.add(queue)
        return queue


class Channels:
    """All that is watched at a server; for one event loop."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self.open: dict[Any, Channel] = {}

    async def serve(self, socket: WebSocket) -> None:
        """Tell a browser the news of what its address names, until it goes away."""
        await socket.accept()
        path, params = socket.url.path, dict(socket.query_params)
        key = path, *sorted(params.items())
        channel = self.open.get(key)
        if channel is None or channel.task.done():
            channel = self.open[key] = Channel(WATCHED[path](self._studio, params))
        queue = channel.enter()
        telling = asyncio.ensure_future(_forward(queue, socket))
        gone = asyncio.ensure_future(_until_gone(socket))
        try:
            await asyncio.wait({telling, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            telling.cancel()
            gone.cancel()
            channel.browsers.discard(queue)
            if not channel.browsers:
                channel.task.cancel()
                if self.open.get(key) is channel:
                    del self.open[key]


async def _forward(queue: "asyncio.Queue[str | None]", socket: WebSocket) -> None:
    while (text := await queue.get()) is not None:
        await socket.send_text(text)
    await socket.close(code=1013)  # try again later


async def _until_gone(socket: WebSocket) -> None:
    async for _ in socket.iter_text():
        pass  # a browser says nothing; what it sends is not read
