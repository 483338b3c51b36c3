"""Connections, bounded in number and in time, so that idle ones do not block clients.

uvicorn's own settings do not suffice: `limit_concurrency` answers 503 to everyone while idle
connections hold all places, and no setting bounds the time until the headers are complete
(`timeout_keep_alive` starts only after an answer).
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ..config.serve import LimitsConfig

RESERVED_FILES = 256
"""Files besides connections: of the store, the journal and the model."""


def bounded(limits: LimitsConfig, *, most: int) -> type[asyncio.Protocol]:
    """Return a protocol that keeps at most `most` connections open.

    One more closes the connection that has been idle for the longest time, which is the new one
    itself if all others are being answered. The headers of a request must arrive in time.
    """
    idle: dict[Any, None] = {}  # ordered by the time at which they became idle

    class Bounded(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._rest()
            self._begin()
            if len(self.connections) > most:
                oldest = next(iter(idle))
                idle.pop(oldest)
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            if self in idle and self._deadline is None:
                self._begin()
            super().data_received(data)
            cycle: Any = self.cycle  # None before the first request
            if cycle is not None and not cycle.response_complete:
                self._end()
                idle.pop(self, None)

        def on_response_complete(self) -> None:
            self._rest()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end()
            idle.pop(self, None)
            super().connection_lost(exc)

        def _rest(self) -> None:
            self._end()
            if not self.transport.is_closing():
                idle.pop(self, None)
                idle[self] = None

        def _begin(self) -> None:
            self._deadline = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def _end(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Bounded


def most_connections(limits: LimitsConfig) -> int:
    """Return how many connections may be open, after raising the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return max(16, allowed - RESERVED_FILES)
    return limits.connections
