"""Idempotent requests: a retry gets the earlier answer and adds no row.

A request is identified by its `Idempotency-Key`, or else by its client's request id together with
its body. Answers are kept in memory up to a number of bytes, their names for longer.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter

from fastapi import Request

from ...store.ids import content_id
from ..inference.policy import Completion
from .errors import RequestError
from .exchange import ChatExchange
from .requests import ChatRequest, of_header
from .sessions import nbytes_of

PREFIX = "chatcmpl-once-"
"""The prefix of response names for requests with a key."""
MOST_KNOWN = 100_000
"""Most response names that are kept."""


@dataclass(frozen=True)
class Retry:
    """The identity of a request that may be retried."""

    response_id: str
    digest: str
    """Of the request; a retry has the same."""


@dataclass
class _Given:
    digest: str
    session_id: str
    created: int
    completions: list[Completion]
    nbytes: int


@dataclass
class _First:
    exchange: ChatExchange
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def retry_of(request: Request, asked: ChatRequest, body: bytes) -> Retry | None:
    """Return the identity of a request, or None if its client did not name it."""
    key = of_header(request.headers, "Idempotency-Key")
    name = of_header(request.headers, "X-Request-Id") or asked.request_id
    if key is None and name is None:
        return None
    names = [request.headers.get(name, "") for name in ("x-session-id", "x-group-id")]
    # With the names of session and group: the same body in another conversation is another request.
    digest = content_id(request.url.path, *names, body.decode("utf-8", "replace"))
    parts = ("key", key) if key is not None else ("request", name, digest)
    return Retry(PREFIX + content_id(*parts, length=24), digest)


class Retries:
    """The answers to requests with a key."""

    def __init__(self, known: Iterable[str] = (), *, most_bytes: int) -> None:
        """Start with the names of the responses of an earlier server."""
        self._known = dict.fromkeys(known)
        self._given: OrderedDict[str, _Given] = OrderedDict()
        self._under_way: dict[str, _First] = {}
        self._most, self._nbytes = most_bytes, 0

    @asynccontextmanager
    async def once(self, exchange: ChatExchange, retry: Retry | None) -> AsyncIterator[bool]:
        """Yield whether a request must be answered; otherwise the exchange has the answer.

        A retry of a request that is being answered waits for it. Raises RequestError if the answer
        was removed from memory, or if the key belongs to a different request.
        """
        if retry is None:
            yield True
            return
        # A loop: if the first request fails, one of those waiting answers and the rest wait again.
        while (first := self._under_way.get(retry.response_id)) is not None:
            exchange.session_id = first.exchange.session_id
            await first.ended.wait()
        if self._repeats(exchange, retry):
            yield False
            return
        mine = self._under_way[retry.response_id] = _First(exchange)
        try:
            yield True
        finally:
            if exchange.recorded:  # kept before those who wait are woken up
                self._keep(exchange, retry)
            del self._under_way[retry.response_id]
            mine.ended.set()

    def _repeats(self, exchange: ChatExchange, retry: Retry) -> bool:
        given = self._given.get(retry.response_id)
        if given is None:
            if retry.response_id in self._known:
                raise RequestError(
                    "this request was answered before, and its answer was removed from memory; see "
                    f"the row with the response `{retry.response_id}`",
                    code="already_answered",
                    status=409,
                )
            return False
        if given.digest != retry.digest:
            message = "the `Idempotency-Key` was given with another request; take a new one"
            raise RequestError(message, code="idempotency_key_reused", status=422)
        self._given.move_to_end(retry.response_id)
        exchange.session_id, exchange.created = given.session_id, given.created
        exchange.sampled(given.completions)
        exchange.recorded = perf_counter()
        exchange.engine_seconds = exchange.recorded - exchange.began  # it waited, if anything
        return True

    def _keep(self, exchange: ChatExchange, retry: Retry) -> None:
        nbytes = 1024 + sum(map(nbytes_of, exchange.completions))
        self._given[retry.response_id] = _Given(
            retry.digest, exchange.session_id, exchange.created, exchange.completions, nbytes
        )
        self._nbytes += nbytes
        self._known[retry.response_id] = None
        while self._nbytes > self._most:
            self._nbytes -= self._given.popitem(last=False)[1].nbytes
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
