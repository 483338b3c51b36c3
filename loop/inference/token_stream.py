"""Who hears an answer while it is sampled, and what of it may be told so far.

A listener reaches the policy that samples through the context, as a stop does, so that whatever
wraps a policy passes it on unknowingly. Engines work in threads and loops of their own, where that
context is not: there each request carries what hears its tokens.
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
"""Takes the next tokens of a request, in whatever thread they were sampled; of an endpoint's answer
the next characters."""
TextDecoder = Callable[[Sequence[Any]], str]
"""Given the next of them, returns what may be told now."""


class TokenStream:
    """Hears the answers to one request, in the event loop that it is made in.

    It keeps no more than the answers' texts, however slowly these are taken. Answers that are
    sampled anew, because who was asked first broke down, are told from where they go beyond what
    was told before: equal requests have equal answers, and `left` raises where they have not.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens: deque[tuple[int, int, Sequence[Any]]] = deque()
        self._is_called = False
        self._attempt = 0
        self._says: list[TextDecoder] = []
        self._again: list[int] = []
        self._told: list[list[str]] = []
        self._next: dict[int, list[str]] = {}
        self._changed = asyncio.Event()
        self.is_begun = False
        """Whether a token was heard."""
        self.seconds = 0.0
        """What it took to make text of tokens."""

    def begin(self, says: Sequence[TextDecoder]) -> list[TokenCallback]:
        """Return what hears the tokens of each answer, told as `says` makes text of them."""
        self._attempt += 1
        self._says = list(says)
        self._told += [[] for _ in says[len(self._told) :]]
        self._again = [sum(map(len, parts)) for parts in self._told]
        return [partial(self._hear, self._attempt, i) for i in range(len(says))]

    def take(self) -> list[tuple[int, str]]:
        """Return what may be told since this was last asked: the answer's number, and text."""
        taken, self._next = self._next, {}
        return [(i, "".join(parts)) for i, parts in taken.items()]

    async def changed(self) -> None:
        """Wait until there may be something to take."""
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Let whoever waits look again."""
        self._changed.set()

    def left(self, contents: Sequence[str]) -> list[str]:
        """Return what of the answers was not told; call it when all is sampled.

        Raises PolicyError when what was told is not how they begin.
        """
        self._listen()
        told = ["".join(parts) for parts in self._told]
        told += [""] * (len(contents) - len(told))
        return [_behind(said, content) for said, content in zip(told, contents, strict=True)]

    def _hear(self, attempt: int, i: int, tokens: Sequence[Any]) -> None:
        self._tokens.append((attempt, i, tokens))
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # its loop has ended, and nobody listens any more
                self._loop.call_soon_threadsafe(self._listen)

    def _listen(self) -> None:
        """Make text of all tokens that were heard; engines add others meanwhile."""
        self._is_called = False  # before they are looked at: who adds one behind them calls again
        began = perf_counter()
        heard: dict[int, list[Any]] = {}
        while self._tokens:
            attempt, i, tokens = self._tokens.popleft()
            if attempt == self._attempt:
                heard.setdefault(i, []).extend(tokens)
        for i, tokens in heard.items():
            self._say(i, self._says[i](tokens))
        self.seconds += perf_counter() - began
        if heard:
            self.is_begun = True
            self.wake()

    def _say(self, i: int, text: str) -> None:
        again = min(self._again[i], len(text))
        self._again[i] -= again
        if text := text[again:]:
            self._told[i].append(text)
            self._next.setdefault(i, []).append(text)


_around: ContextVar[TokenStream | None] = ContextVar("listener", default=None)


@contextmanager
def streaming_to(listener: TokenStream | None) -> Iterator[None]:
    """Let what is sampled for the answer that is asked for in the block be heard."""
    token = _around.set(listener)
    try:
        yield
    finally:
        _around.reset(token)


def current_callbacks(says: Sequence[TextDecoder]) -> list[TokenCallback] | list[None]:
    """Return what hears the tokens of answers that begin here; None for each when nobody does."""
    listener = _around.get()
    return [None] * len(says) if listener is None else listener.begin(says)


def _behind(said: str, content: str) -> str:
    """Return what stands behind what was said; before calls, a content begins without spaces."""
    for told in (said, said.lstrip()):
        if content.startswith(told):
            return content[len(told) :]
    raise PolicyError("the answer is another one than that which was told while it was sampled")
