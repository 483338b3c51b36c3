"""Sessions: what was asked and answered under one name, so that turns can become rows.

A request without a name is a session of its own, which ends as it is answered. Everything is
bounded in bytes: sessions that are too large, or rest too long, end, and go to the sink.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic, time_ns
from typing import Any, Protocol

from ...store.records import Message
from ..inference.policy import Completion, Turn
from .requests import same_answer

_TOKEN_BYTES = 72
"""Of a token and its log-prob in memory, about."""


@dataclass(eq=False)
class Session:
    """A conversation, or an agent's run of several: turns by their order."""

    id: str
    key: str
    """Unique and sortable, of this part of it: a session that ended may be gone on with."""
    group_id: str | None = None
    """Sessions of one group are tries whose rewards are compared."""
    turns: list[Turn] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    """The name of the response that each turn belongs to."""
    feedback: list[dict[str, Any]] = field(default_factory=list)
    """What was said of it so far, to be stored with its rows."""
    rollout: int | None = None
    """The number of its try in its group, once it is given."""
    nbytes: int = 2048
    """What it holds, about."""
    began: float = field(default_factory=monotonic)
    touched: float = field(default_factory=monotonic)
    under_way: int = 0
    """Requests that are being answered."""
    is_ended: bool = False
    handed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended and the sink has it."""

    @property
    def is_named(self) -> bool:
        """Whether the caller named it; others end with their only request."""
        return self.id != self.key

    def as_recorded(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with the answers of this session as they were given.

        Clients spell calls and their arguments anew; what was sampled stays as it was.
        """
        found = list(messages)
        for turn in sorted(self.turns, key=lambda turn: len(turn.messages)):
            at, answer = len(turn.messages), turn.completion.answer
            if at >= len(found) or not same_answer(found[at], answer):
                continue
            if found[:at] == list(turn.messages):
                found[at] = answer
        return found


class Sink(Protocol):
    """Where turns and sessions go to."""

    async def keep(self, session: Session, turns: Sequence[Turn], response_id: str) -> None:
        """Keep turns so that nothing loses them; the answer ends when this returns."""
        ...

    async def ended(self, session: Session) -> None:
        """Take a session that no turn will be added to."""
        ...


class NullSink:
    """The sink of a server that keeps nothing but what goes on."""

    async def keep(self, session: Session, turns: Sequence[Turn], response_id: str) -> None:
        """Keep nothing."""

    async def ended(self, session: Session) -> None:
        """Keep nothing."""


def new_key() -> str:
    """Return a name that no other has, and that sorts by time.

    >>> new_key() < new_key()
    True
    """
    return f"{time_ns():016x}{secrets.token_hex(4)}"


class Sessions:
    """The sessions that go on, by their id."""

    def __init__(
        self,
        sink: Sink | None = None,
        *,
        session_bytes: int = 16 << 20,
        all_bytes: int = 256 << 20,
        idle_seconds: float = 300.0,
        longest_seconds: float = 3600.0,
    ) -> None:
        self.sink: Sink = sink or NullSink()
        self._session_bytes, self._all_bytes = session_bytes, all_bytes
        self._idle, self._longest = idle_seconds, longest_seconds
        self._open: dict[str, Session] = {}
        self._responses: dict[str, Session] = {}
        self.nbytes = 0
        """What all of them hold, about."""
        self.ending: set[Session] = set()
        """Those that have ended, and are not handed to the sink yet."""

    def __len__(self) -> int:
        return len(self._open)

    def find(self, session_id: str) -> Session | None:
        """Return a session that goes on."""
        return self._open.get(session_id)

    def of_response(self, response_id: str) -> Session | None:
        """Return the session that goes on in which a response was given."""
        return self._responses.get(response_id)

    def turns(self, session_id: str) -> list[Turn]:
        """Return what was asked and answered so far in a session that goes on."""
        found = self._open.get(session_id)
        return list(found.turns) if found else []

    @contextmanager
    def request(self, session_id: str | None, group_id: str | None = None) -> Iterator[Session]:
        """Give a request its session; until it is done, the session rests not."""
        session = self._of(session_id, group_id)
        session.under_way += 1
        try:
            yield session
        finally:
            session.under_way -= 1
            session.touched = monotonic()

    async def record(
        self,
        session: Session,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        completions: Sequence[Completion],
        *,
        response_id: str,
        nbytes: int = 0,
    ) -> Session:
        """Add the turns that a request came to; return the session that they are of.

        That is another part of it when it ended meanwhile. `nbytes` are those of the messages.
        Nothing is added when the sink fails.
        """
        if session.is_ended:
            session = self._of(session.id if session.is_named else None, session.group_id)
        turns = [Turn(messages=messages, completion=one, tools=tools) for one in completions]
        session.turns += turns  # before it is kept: whoever ends the session meanwhile has them
        session.responses += [response_id] * len(turns)
        more = nbytes + sum(nbytes_of(one) for one in completions)
        session.nbytes += more
        if session.is_named:
            self._responses[response_id] = session
            self.nbytes += more
        try:
            await self.sink.keep(session, turns, response_id)
        except Exception:
            self._take_back(session, response_id)
            raise
        finally:
            if not session.is_named or session.nbytes > self._session_bytes:
                await self._end(session)
        if self.nbytes > self._all_bytes:
            await self.sweep()
        return session

    async def end(
        self, session_id: str, *, last: Callable[[Session], Awaitable[None]] | None = None
    ) -> Session | None:
        """End a session and hand it to the sink; None when there is none of that name.

        `last` is called before, when no turn can be added any more.
        """
        session = self._open.get(session_id)
        return None if session is None else await self._end(session, last=last)

    async def sweep(self) -> None:
        """End the sessions that rest too long, or go on for too long, or are too much together."""
        now = monotonic()
        resting = sorted(self._resting(), key=lambda s: s.touched)
        for session in resting:
            old = now - session.touched > self._idle or now - session.began > self._longest
            if old or self.nbytes > self._all_bytes:
                await self._end(session)

    async def close(self) -> None:
        """End all sessions."""
        for session in list(self._open.values()):
            await self._end(session)

    def _take_back(self, session: Session, response_id: str) -> None:
        if session.is_ended:
            return
        pairs = zip(session.turns, session.responses, strict=True)
        kept = [(turn, name) for turn, name in pairs if name != response_id]
        session.turns, session.responses = [t for t, _ in kept], [name for _, name in kept]
        self._responses.pop(response_id, None)

    def _resting(self) -> list[Session]:
        return [s for s in self._open.values() if not s.under_way]

    def _of(self, session_id: str | None, group_id: str | None) -> Session:
        key = new_key()
        if session_id is None:
            return Session(id=key, key=key, group_id=group_id)
        found = self._open.get(session_id)
        if found is None:
            found = self._open[session_id] = Session(id=session_id, key=key, group_id=group_id)
            self.nbytes += found.nbytes
        return found

    async def _end(
        self, session: Session, *, last: Callable[[Session], Awaitable[None]] | None = None
    ) -> Session:
        if session.is_ended:
            return session
        session.is_ended = True
        self.ending.add(session)
        if self._open.get(session.id) is session:
            del self._open[session.id]
            self.nbytes -= session.nbytes
        for name in session.responses:
            self._responses.pop(name, None)
        try:
            if last is not None:
                await last(session)
        finally:
            if session.turns:
                await self.sink.ended(session)
            self.ending.discard(session)
            session.handed.set()
        return session


def with_own_calls(completion: Completion, response_id: str, i: int) -> Completion:
    """Return a completion whose calls have names that no other turn's have."""
    calls = completion.answer.get("tool_calls")
    if not calls:
        return completion
    named = [{**call, "id": f"call_{response_id[-12:]}_{i}_{k}"} for k, call in enumerate(calls)]
    return replace(completion, message={**completion.answer, "tool_calls": named})


def nbytes_of(one: Completion) -> int:
    """Return what an answer holds in memory, about."""
    tokens = len(one.prompt_ids or ()) + len(one.token_ids or ())
    return _TOKEN_BYTES * tokens + 4 * len(one.text) + 1024
