"""What is refused before anything is read or worked on: strangers, bodies too large, too many."""

import asyncio
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import unquote_to_bytes

from ..config.serve import LimitsConfig
from .errors import RequestError

OPEN_PATHS = ("/health",)
"""What anybody may ask."""
FEEDBACK_PATH = "/feedback"
_RETRY_SECONDS = 1.0

Scope = dict[str, Any]


class Guard:
    """The outermost application: lets in who has the token, with bodies that are not too large.

    Without a token, only requests that a web page cannot make are let in: their host is loopback,
    and their body is JSON. With a token for feedback, feedback needs that one and no other.
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
        self._token = None if token is None else token.encode()
        self._feedback_token = None if feedback_token is None else feedback_token.encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer, or hand the request on."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except RequestError as error:
                self._refused(error.status)
                await send_error(send, error)
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
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limits.max_body_bytes:
            raise too_large(self._limits)


def _check_path(scope: Scope) -> None:
    try:
        unquote_to_bytes(scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError:
        raise RequestError("the path must be percent-encoded UTF-8") from None


def _check_token(given: bytes, token: bytes) -> None:
    kind, _, said = given.partition(b" ")
    if kind.lower() != b"bearer" or not hmac.compare_digest(said.strip(), token):
        raise RequestError("the token is missing or wrong", status=401, code="invalid_api_key")


def _check_local(scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Refuse what the page of another site may have sent through somebody's browser."""
    host = headers.get(b"host", b"").decode("latin-1")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not is_loopback(name.strip("[]")):
        message = f"this server has no token, so it is not served as `{name:.100}`"
        raise RequestError(message, status=403)
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if scope["method"] == "POST" and kind != b"application/json":
        raise RequestError("the body's `content-type` must be application/json", status=415)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine, which nobody else reaches.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def too_large(limits: LimitsConfig) -> RequestError:
    """Return the error for a body that is longer than it may be."""
    return RequestError(f"a body has at most {limits.max_body_bytes:,} bytes", status=413)


async def send_error(send: Any, error: RequestError) -> None:
    """Answer with an error, and close: whatever else was sent is not read."""
    body = json.dumps(error.body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *((name.lower().encode(), value.encode()) for name, value in headers_of(error).items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def headers_of(error: RequestError) -> dict[str, str]:
    """Return the headers that belong to an error."""
    found = {} if error.retry_after is None else {"Retry-After": f"{error.retry_after:.0f}"}
    return found | ({"WWW-Authenticate": "Bearer"} if error.status == 401 else {})


class RequestLimiter:
    """Bounds the requests under way, those that wait for a place, and the bytes of their bodies."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._free = asyncio.Semaphore(limits.max_concurrent_requests)
        self.running = 0
        self.waiting = 0
        self._bytes = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place; RequestError when too many wait, or none becomes free in time."""
        if self.waiting >= self._limits.max_queued_requests and self._free.locked():
            message = f"{self.waiting} requests wait already; try again"
            raise RequestError(message, status=429, retry_after=_RETRY_SECONDS)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._limits.wait_seconds):
                await self._free.acquire()
        except TimeoutError:
            message = f"no place became free in {self._limits.wait_seconds:g} s; try again"
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
        """Count the bytes of a body for as long as it is held."""
        held = BodyBudget(self, self._limits)
        try:
            yield held
        finally:
            self.take(-held.nbytes)

    def take(self, nbytes: int) -> None:
        """Count bytes; RequestError when there are too many."""
        if nbytes > 0 and self._bytes + nbytes > self._limits.max_total_body_bytes:
            message = "too many bytes are being read; try again"
            raise RequestError(message, status=503, retry_after=_RETRY_SECONDS)
        self._bytes += nbytes


class BodyBudget:
    """The body of one request, while it is read."""

    def __init__(self, places: RequestLimiter, limits: LimitsConfig) -> None:
        self._places, self._limits = places, limits
        self.nbytes = 0

    async def read(self, parts: AsyncIterator[bytes]) -> bytes:
        """Return a body; RequestError when it is too long, or takes too long."""
        found: list[bytes] = []
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in parts:
                    if self.nbytes + len(part) > self._limits.max_body_bytes:
                        raise too_large(self._limits)
                    self._places.take(len(part))
                    self.nbytes += len(part)
                    found.append(part)
        except TimeoutError:
            message = f"the body took longer than {self._limits.body_seconds:g} s"
            raise RequestError(message, status=408) from None
        return b"".join(found)
