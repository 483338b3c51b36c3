"""Sessions: the turns of one client conversation, collected until they become rows.

A request without a session name is its own session, which ends when it is answered. All sessions
are limited in bytes; those that are too large or idle for too long end and go to the sink.
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
from .messages import same_answer

_TOKEN_BYTES = 72
"""Approximate size of a token and its log-prob in memory."""


@dataclass(eq=False)
class Session:
    """The ordered turns of a conversation, or of an agent's several conversations."""

    id: str
    key: str
    """Unique and sortable; a session that continues after its end gets a new one."""
    group_id: str | None = None
    """Sessions of one group are rollouts whose rewards are compared."""
    turns: list[Turn] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    """The name of the response that each turn belongs to."""
    feedback: list[dict[str, Any]] = field(default_factory=list)
    """Feedback so far, which is stored with the rows."""
    rollout: int | None = None
    """The rollout's index in its group, once it is assigned."""
    nbytes: int = 2048
    """Approximate size in memory."""
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
        """Return messages with the recorded answers of this session in place of the client's.

        Clients reformat calls and their arguments; the sampled text must stay unchanged.
        """
        found = list(messages)
        # short prompts first: longer ones are compared with the answers already replaced
        for turn in sorted(self.turns, key=lambda turn: len(turn.messages)):
            at, answer = len(turn.messages), turn.completion.answer
            if at >= len(found) or not same_answer(found[at], answer):
                continue
            if found[:at] == list(turn.messages):
                found[at] = answer
        return found


class Sink(Protocol):
    """Where turns and sessions are stored."""

    async def keep(self, session: Session, turns: Sequence[Turn], response_id: str) -> None:
        """Store turns durably; the response ends only after this returns."""
        ...

    async def ended(self, session: Session) -> None:
        """Take a session that has ended."""
        ...


class NullSink:
    """A sink that stores nothing; turns exist only in open sessions."""

    async def keep(self, session: Session, turns: Sequence[Turn], response_id: str) -> None:
        """Keep nothing."""

    async def ended(self, session: Session) -> None:
        """Keep nothing."""


def new_key() -> str:
    """Return a unique name that sorts by time.

    >>> new_key() < new_key()
    True
    """
    return f"{time_ns():016x}{secrets.token_hex(4)}"


class Sessions:
    """The open sessions by their id."""

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
        """Approximate size of all open sessions."""
        self.ending: set[Session] = set()
        """Sessions that have ended but are not yet in the sink."""

    def __len__(self) -> int:
        return len(self._open)

    def find(self, session_id: str) -> Session | None:
        """Return an open session, or None."""
        return self._open.get(session_id)

    def of_response(self, response_id: str) -> Session | None:
        """Return the open session of a response, or None."""
        return self._responses.get(response_id)

    def turns(self, session_id: str) -> list[Turn]:
        """Return the turns so far of an open session."""
        found = self._open.get(session_id)
        return list(found.turns) if found else []

    @contextmanager
    def request(self, session_id: str | None, group_id: str | None = None) -> Iterator[Session]:
        """Yield the session of a request; until the request is done, the session is not idle."""
        session = self._of(session_id, group_id)
        session.under_way += 1
        try:
            yield session
        finally:
            # a session with requests under way is never swept, however old it is
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
        """Add the turns of a request; return their session.

        If the session ended in the meantime, that is a new part of it. `nbytes` is the size of the
        messages. Nothing is added if the sink fails.
        """
        if session.is_ended:
            session = self._of(session.id if session.is_named else None, session.group_id)
        turns = [Turn(messages=messages, completion=one, tools=tools) for one in completions]
        session.turns += turns  # before awaiting the sink: the session may end meanwhile
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
        """End a session and pass it to the sink; return None if no such session is open.

        `last` is called before that, when no more turns can be added.
        """
        session = self._open.get(session_id)
        return None if session is None else await self._end(session, last=last)

    async def sweep(self) -> None:
        """End sessions that are idle or open for too long, or exceed the memory limit."""
        now = monotonic()
        # Those under way are left alone: their answers are turns that are still missing.
        resting = [session for session in self._open.values() if not session.under_way]
        # The longest idle first, so that the limit on memory ends those that are the
        # least likely to continue.
        for session in sorted(resting, key=lambda s: s.touched):
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
        session.is_ended = True  # before any await: a turn from now on starts a new part
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
    """Return a completion whose tool calls have unique ids."""
    calls = completion.answer.get("tool_calls")
    if not calls:
        return completion
    named = [{**call, "id": f"call_{response_id[-12:]}_{i}_{k}"} for k, call in enumerate(calls)]
    return replace(completion, message={**completion.answer, "tool_calls": named})


def nbytes_of(one: Completion) -> int:
    """Return the approximate size of an answer in memory."""
    tokens = len(one.prompt_ids or ()) + len(one.token_ids or ())
    return _TOKEN_BYTES * tokens + 4 * len(one.text) + 1024
