"""Route the requests of recordings to the policies of their sessions.

A thread has one application for all recordings of its event loop. Another application runs in a
server on loopback, which is started once per process, when the URL of a recording is first needed.
Its requests are passed to the event loop in which the recording began.
"""

import asyncio
import secrets
import socket
import threading
from collections.abc import Collection, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ...store.errors import missing_extra
from ...store.records import Message
from ..inference.event_loop import shared_loop
from ..inference.policy import Completion, Policy, PolicyError, Sampling, Turn, default_sampling

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .sessions import Session

T = TypeVar("T")
REPLY_SECONDS = 60.0
"""How long a recording's event loop may be blocked before its HTTP requests fail."""
_ALWAYS = {"seed", "top_logprobs"}
"""Fields of Sampling that every request may set, since they change no distribution."""
_FORMS = {"json_schema": "response_format", "forced_tools": "tool_choice"}
"""Fields that an agent relies on, so that they are refused rather than left out."""
_session: ContextVar[str] = ContextVar("session")


@dataclass(eq=False)
class Route:
    """The policy that answers the requests of a session, and the turns so far."""

    policy: Policy
    heeds: Collection[str]
    """The fields of Sampling that a request may set."""
    turns: list[Turn] = field(default_factory=list)
    failure: PolicyError | None = None
    """The error of the last request, or None."""
    is_remote: bool = False
    """Whether its URL was used."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    context: Context = field(default_factory=copy_context)

    @property
    def sampling(self) -> Sampling:
        """The policy's sampling settings."""
        return default_sampling(self.policy)

    def heeded(self, asked: Sampling | None) -> Sampling:
        """Return the policy's sampling settings with those that a request may set."""
        if asked is None:
            return self.sampling
        for name, param in _FORMS.items():
            if getattr(asked, name) and name not in self.heeds:
                raise PolicyError(
                    f"`{param}` would sample from another distribution than the policy's; add "
                    f"`{name}` to `heeds` to allow it",
                    finish_reason="invalid_request",
                    param=param,
                )
        names = [f.name for f in fields(Sampling) if f.name in _ALWAYS.union(self.heeds)]
        return replace(self.sampling, **{name: getattr(asked, name) for name in names})

    async def here(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine in the event loop in which the recording began."""
        if asyncio.get_running_loop() is self.loop:
            return await work
        # Only this probe has a timeout: sampling itself may take longer.
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                await _run(self.loop, asyncio.sleep(0))
        except TimeoutError:
            work.close()
            raise PolicyError(
                f"the event loop of the workflow did nothing for {REPLY_SECONDS:g} s; run an agent "
                "that is not async in a thread: `await asyncio.to_thread(agent, ...)`"
            ) from None

        async def begun() -> T:
            return await self.loop.create_task(work, context=self.context)

        return await _run(self.loop, begun())


async def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class Router:
    """A policy that passes each request to the policy of its session."""

    version: int | None = None

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}

    @property
    def sampling(self) -> Sampling:
        """The sampling settings of this request's policy."""
        return self._route().sampling

    @property
    def inner(self) -> Policy:
        """The policy of this request."""
        policy = self._route().policy
        return getattr(policy, "inner", policy)

    async def generate(
        self, messages: Sequence[Message], *, sampling: Sampling | None = None, **options: Any
    ) -> list[Completion]:
        """Sample from the policy of this request."""
        route = self._route()
        try:
            chosen = route.heeded(sampling)
            made = await route.here(route.policy.generate(messages, sampling=chosen, **options))
        except PolicyError as error:
            route.failure = error
            raise
        route.failure = None
        return made

    def _route(self) -> Route:
        found = self.routes.get(_session.get(""))
        if found is None:
            from .errors import RequestError

            raise RequestError("this session has ended or does not exist", status=404)
        return found

    async def keep(self, session: "Session", turns: Sequence[Turn], response_id: str) -> None:
        """Add turns to the route of their session."""
        if (route := self.routes.get(session.id)) is not None:
            route.turns += turns

    async def ended(self, session: "Session") -> None:
        """Do nothing: only the turns are kept."""


ROUTER = Router()
"""The routes of all recordings of this process."""


class SessionPathMiddleware:
    """Sets the session of a request, by its path, for the wrapped application."""

    def __init__(self, app: "FastAPI") -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        parts = scope.get("path", "").split("/")
        _session.set(parts[2] if len(parts) > 2 and parts[1] == "sessions" else "")
        await self.app(scope, receive, send)

    async def end(self, session_id: str) -> None:
        """Forget a session."""
        await self.app.state.sessions.end(session_id)


def _application(*, token: str | None = None) -> SessionPathMiddleware:
    try:
        from ..config.serve import LimitsConfig, ServeConfig
        from .app import create_app
    except ModuleNotFoundError as error:
        raise missing_extra(str(error.name), "serve") from error
    many = 1 << 16  # no limit here: explorers limit rollouts, and engines their requests
    limits = LimitsConfig(
        max_body_bytes=64 << 20,
        max_concurrent_requests=many,
        max_queued_requests=many,
        session_bytes=1 << 30,
    )
    return SessionPathMiddleware(
        create_app(ROUTER, ROUTER, ServeConfig(limits=limits), token=token)
    )


class _Here(threading.local):
    loop: asyncio.AbstractEventLoop | None = None
    app: SessionPathMiddleware | None = None


# An application's locks belong to the event loop that first used them, and each thread has one.
_here = _Here()


def application() -> SessionPathMiddleware:
    """Return the application of the running event loop."""
    loop = asyncio.get_running_loop()
    if _here.app is None or _here.loop is not loop:
        _here.loop, _here.app = loop, _application()
    return _here.app


@dataclass(frozen=True)
class Server:
    """The server of this process, on loopback, protected by a token."""

    address: str
    token: str
    app: SessionPathMiddleware


_starting = threading.Lock()


def server() -> Server:
    """Return the server, which is started on first use."""
    # `cache` alone does not keep two threads from each starting a server.
    with _starting:
        return _server()


@cache
def _server() -> Server:
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise missing_extra("uvicorn", "serve") from error
    token = secrets.token_urlsafe(24)
    app = _application(token=token)
    # Listening before the server starts: the port is known now, and early requests wait.
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    serving = uvicorn.Server(settings)
    shared_loop().submit(serving.serve(sockets=[listening]))
    return Server(f"http://127.0.0.1:{listening.getsockname()[1]}", token, app)
