"""Requests that come again: whoever tries again gets the answer that was given, and makes no row.

A request has the key of its `Idempotency-Key`, or else the id that its client gave it together
with its body. Answers are kept in memory, bounded in bytes; that there was one, for longer.
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
from .header_values import of_header
from .replies import ChatExchange
from .requests import Asked
from .sessions import nbytes_of

PREFIX = "chatcmpl-once-"
"""How the names of answers to requests with a key begin."""
MOST_KNOWN = 100_000
"""Answers of which it is remembered that they were given."""


@dataclass(frozen=True)
class Retry:
    """What tells that a request came before."""

    response_id: str
    said: str
    """Stands for all that it asks; the same when it is tried again."""


@dataclass
class _Given:
    said: str
    session_id: str
    created: int
    completions: list[Completion]
    nbytes: int


@dataclass
class _First:
    exchange: ChatExchange
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def retry_of(request: Request, asked: Asked, body: bytes) -> Retry | None:
    """Return what tells a request from others; None when its client gives it no name."""
    key = of_header(request.headers, "Idempotency-Key")
    name = of_header(request.headers, "X-Request-Id") or asked.request_id
    if key is None and name is None:
        return None
    names = [request.headers.get(name, "") for name in ("x-session-id", "x-group-id")]
    said = content_id(request.url.path, *names, body.decode("utf-8", "replace"))
    parts = ("key", key) if key is not None else ("request", name, said)
    return Retry(PREFIX + content_id(*parts, length=24), said)


class Retries:
    """The answers that were given to requests with a key."""

    def __init__(self, known: Iterable[str] = (), *, most_bytes: int) -> None:
        """Begin with the names of answers that an earlier server gave."""
        self._known = dict.fromkeys(known)
        self._given: OrderedDict[str, _Given] = OrderedDict()
        self._under_way: dict[str, _First] = {}
        self._most, self._nbytes = most_bytes, 0

    @asynccontextmanager
    async def once(self, exchange: ChatExchange, retry: Retry | None) -> AsyncIterator[bool]:
        """Tell whether a request is to be answered; if not, the exchange has the answer.

        One that comes while the same is answered waits for it. Raises RequestError when the answer
        is not known any more, or when the key was another request's.
        """
        if retry is None:
            yield True
            return
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
            if exchange.recorded:
                self._keep(exchange, retry)
            del self._under_way[retry.response_id]
            mine.ended.set()

    def _repeats(self, exchange: ChatExchange, retry: Retry) -> bool:
        given = self._given.get(retry.response_id)
        if given is None:
            if retry.response_id in self._known:
                message = "was answered before, and is stored; its answer is not kept any more"
                raise RequestError(
                    f"this request {message}: see the row with the response `{retry.response_id}`",
                    code="already_answered",
                    status=409,
                )
            return False
        if given.said != retry.said:
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
            retry.said, exchange.session_id, exchange.created, exchange.completions, nbytes
        )
        self._nbytes += nbytes
        self._known[retry.response_id] = None
        while self._nbytes > self._most:
            self._nbytes -= self._given.popitem(last=False)[1].nbytes
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
