"""Token streaming: deliver answers while they are being sampled.

The stream reaches the sampling policy through a context variable, like a cancellation scope, so
that wrappers of policies need not pass it on. Engines work in threads and loops without that
context: there, each request carries its callback.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from time import perf_counter
from typing import Any

from .policy import PolicyError

TokenCallback = Callable[[Sequence[Any]], None]
"""Takes the next tokens of a request, in any thread; for an endpoint's answer, characters."""
TextDecoder = Callable[[Sequence[Any]], str]
"""Given the next tokens, returns the text that is final so far."""


class TokenStream:
    """Receives the answers to one request, in the event loop in which it is created.

    It holds no more than the answers' texts, however slowly these are read. If a request is
    sampled again, because its first engine failed, only text beyond what was streamed before is
    delivered: equal requests have equal answers, and `left` raises if they do not.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens: deque[tuple[int, int, Sequence[Any]]] = deque()
        self._is_called = False
        self._attempt = 0
        self._decoders: list[TextDecoder] = []
        self._repeated: list[int] = []
        self._streamed: list[str] = []
        self._next: dict[int, str] = {}
        self._changed = asyncio.Event()
        self.is_begun = False
        """Whether a token has arrived."""
        self.seconds = 0.0
        """Time spent decoding."""

    def begin(self, decoders: Sequence[TextDecoder]) -> list[TokenCallback]:
        """Return a callback for the tokens of each answer."""
        self._attempt += 1
        self._decoders = list(decoders)
        self._streamed += [""] * (len(decoders) - len(self._streamed))
        self._repeated = list(map(len, self._streamed))
        return [partial(self._receive, self._attempt, i) for i in range(len(decoders))]

    def take(self) -> list[tuple[int, str]]:
        """Return the texts since the last call, each with the index of its answer."""
        taken, self._next = self._next, {}
        return list(taken.items())

    async def changed(self) -> None:
        """Wait until there may be something to take."""
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """End the wait of `changed`."""
        self._changed.set()

    def left(self, contents: Sequence[str]) -> list[str]:
        """Return the rest of each complete answer that was not streamed.

        Raises PolicyError if an answer does not begin with what was streamed.
        """
        # Tokens may have arrived whose decoding is only scheduled.
        self._decode()
        streamed = [*self._streamed, *[""] * (len(contents) - len(self._streamed))]
        return list(map(_rest, streamed, contents))

    def _receive(self, attempt: int, i: int, tokens: Sequence[Any]) -> None:
        # Without a lock: `deque.append` is atomic, and the flag below only saves calls.
        self._tokens.append((attempt, i, tokens))
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop has ended, and with it the reader
                self._loop.call_soon_threadsafe(self._decode)

    def _decode(self) -> None:
        """Make text of all tokens so far, while engines add others."""
        self._is_called = False  # first, so that tokens which arrive from now on schedule a call
        began = perf_counter()
        received: dict[int, list[Any]] = {}
        while self._tokens:
            attempt, i, tokens = self._tokens.popleft()
            if attempt == self._attempt:
                received.setdefault(i, []).extend(tokens)
        for i, tokens in received.items():
            text = self._decoders[i](tokens)
            skipped = min(self._repeated[i], len(text))
            self._repeated[i] -= skipped
            self._streamed[i] += text[skipped:]
            if text[skipped:]:
                self._next[i] = self._next.get(i, "") + text[skipped:]
        self.seconds += perf_counter() - began
        if received:
            self.is_begun = True
            self.wake()


_current: ContextVar[TokenStream | None] = ContextVar("token_stream", default=None)


@contextmanager
def streaming_to(stream: TokenStream | None) -> Iterator[None]:
    """Stream the answer to the request made in the block."""
    token = _current.set(stream)
    try:
        yield
    finally:
        _current.reset(token)


def current_callbacks(
    n: int, decoder: Callable[[], TextDecoder]
) -> list[TokenCallback] | list[None]:
    """Return callbacks for the tokens of `n` new answers; None for each without a stream."""
    stream = _current.get()
    return [None] * n if stream is None else stream.begin([decoder() for _ in range(n)])


def _rest(streamed: str, content: str) -> str:
    for begun in (streamed, streamed.lstrip()):  # a content before calls begins without spaces
        if content.startswith(begun):
            return content[len(begun) :]
    raise PolicyError("the answer differs from what was streamed while it was sampled")
