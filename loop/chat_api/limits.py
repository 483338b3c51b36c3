"""Access control, size limits and queueing of requests, before anything is read or sampled."""

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import unquote_to_bytes

from ...operators.endpoint import is_loopback
from ...store.errors import ConfigError
from ..config.serve import LimitsConfig
from .errors import RequestError

OPEN_PATHS = ("/health",)
"""Paths that need no token."""
FEEDBACK_PATH = "/feedback"
_RETRY_SECONDS = 1.0

Scope = dict[str, Any]


class Guard:
    """The outermost ASGI middleware: checks the token and the size of the body.

    Without a token it admits only requests that a web page of another site cannot send: to a
    loopback host, with a JSON body. A separate feedback token replaces the token for feedback.
    """

    def __init__(
        self,
        app: Any,
        *,
        token: str | None,
        feedback_token: str | None = None,
        limits: LimitsConfig,
        refused: Any,
    ) -> None:
        self._app, self._limits, self._refused = app, limits, refused
        self._token, self._feedback_token = token, feedback_token

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except RequestError as error:
                self._refused(error.status)
                # The rest of the request is not read, so the connection cannot be used again.
                await error.response(Connection="close")(scope, receive, send)
                return
        elif scope["type"] != "lifespan":  # no websockets here
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        _check_path(scope)
        if scope["path"] not in OPEN_PATHS:
            rates = scope["path"] == FEEDBACK_PATH and self._feedback_token is not None
            token = self._feedback_token if rates else self._token
            if self._token is None:
                _check_local(scope, headers)
            if token is not None:
                _check_token(headers.get(b"authorization", b""), token)
        # bodies that do not tell their length are counted while they are read
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limits.max_body_bytes:
            raise too_large(self._limits)


def _check_path(scope: Scope) -> None:
    try:
        unquote_to_bytes(scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError:
        raise RequestError("the path must be percent-encoded UTF-8") from None


def _check_token(given: bytes, token: str) -> None:
    kind, _, sent = given.partition(b" ")
    # `compare_digest` takes constant time, so that timing does not reveal the token.
    if kind.lower() != b"bearer" or not hmac.compare_digest(sent.strip(), token.encode()):
        raise RequestError("the token is missing or wrong", status=401, code="invalid_api_key")


def _check_local(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Refuse requests that a page of another site could send through a user's browser."""
    host = headers.get(b"host", b"").decode("latin-1")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not is_loopback(name.strip("[]")):
        message = f"this server has no token, so it is not served as `{name:.100}`"
        raise RequestError(message, status=403)
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if scope["method"] == "POST" and kind != b"application/json":
        raise RequestError("the body's `content-type` must be application/json", status=415)


def listen(host: str, port: int, *, backlog: int = 2048) -> socket.socket:
    """Return a listening socket. Raises ConfigError if that is not possible."""
    try:
        [family, *_, address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(
            f"cannot serve at {host}, port {port}: {error.strerror or error}; choose another "
            "`--host` or `--port`"
        ) from error


def too_large(limits: LimitsConfig) -> RequestError:
    """Return the error for a body that is too long."""
    return RequestError(f"a body has at most {limits.max_body_bytes:,} bytes", status=413)


class RequestLimiter:
    """Bounds the requests that run, those in the queue, and the bytes of their bodies.

    uvicorn's `limit_concurrency` has no queue: it would refuse what can be answered a moment later.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._free = asyncio.Semaphore(limits.max_concurrent_requests)
        self.running = 0
        self.waiting = 0
        self._bytes = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot. Raises RequestError if the queue is full or no slot is free in time."""
        if self.waiting >= self._limits.max_queued_requests and self._free.locked():
            message = f"{self.waiting} requests are waiting already; try again"
            raise RequestError(message, status=429, retry_after=_RETRY_SECONDS)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._limits.wait_seconds):
                await self._free.acquire()
        except TimeoutError:
            message = f"no engine became free in {self._limits.wait_seconds:g} s; try again"
            raise RequestError(message, status=503, retry_after=_RETRY_SECONDS) from None
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._free.release()

    @contextmanager
    def holding(self) -> Iterator["BodyBudget"]:
        """Count the bytes of a body while it is in memory."""
        held = BodyBudget(self, self._limits)
        try:
            yield held
        finally:
            self.take(-held.nbytes)

    def take(self, nbytes: int) -> None:
        """Count bytes. Raises RequestError if there are too many."""
        if nbytes > 0 and self._bytes + nbytes > self._limits.max_total_body_bytes:
            message = "too many bytes are being read; try again"
            raise RequestError(message, status=503, retry_after=_RETRY_SECONDS)
        self._bytes += nbytes


class BodyBudget:
    """The body of one request while it is read."""

    def __init__(self, limiter: RequestLimiter, limits: LimitsConfig) -> None:
        self._limiter, self._limits = limiter, limits
        self.nbytes = 0

    async def read(self, parts: AsyncIterator[bytes]) -> bytes:
        """Return a body. Raises RequestError if it is too long or takes too long."""
        found: list[bytes] = []
        try:
            # a client that sends a byte a minute would hold its place forever
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in parts:
                    if self.nbytes + len(part) > self._limits.max_body_bytes:
                        raise too_large(self._limits)
                    self._limiter.take(len(part))
                    self.nbytes += len(part)
                    found.append(part)
        except TimeoutError:
            message = f"the body took longer than {self._limits.body_seconds:g} s"
            raise RequestError(message, status=408) from None
        return b"".join(found)
