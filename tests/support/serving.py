"""Requests to an application in this process: `from support.serving import asking, chat`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from rlake.loop.chat_api.app import create_app, new_sessions
from rlake.loop.chat_api.limits import listen
from rlake.loop.chat_api.metrics import ServingMetrics
from rlake.loop.chat_api.sessions import Session, Sessions
from rlake.loop.config import LimitsConfig, ServeConfig
from rlake.loop.inference.policy import Policy
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.serving.connections import bounded
from rlake.loop.serving.feedback import Feedback
from rlake.loop.serving.store_writer import StoreWriter
from rlake.store import Store

T = TypeVar("T")
ADDRESS = "http://127.0.0.1:8010"


def asking(app: Any, ask: Callable[[httpx.AsyncClient], Awaitable[T]], **headers: str) -> T:
    """Ask an application in this process."""

    async def work() -> T:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url=ADDRESS, headers=headers
        ) as client:
            return await ask(client)

    return asyncio.run(work())


@asynccontextmanager
async def listening(
    app: Any, *, limits: LimitsConfig | None = None, most: int = 64
) -> AsyncIterator[str]:
    """A server of an application on loopback, in this event loop; gives its address."""
    config = uvicorn.Config(
        app,
        http=bounded(limits or LimitsConfig(), most=most),
        ws="none",
        log_level="error",
        lifespan="off",
    )
    server, socket = uvicorn.Server(config), listen("127.0.0.1", 0)
    task = asyncio.create_task(server._serve([socket]))  # pyright: ignore[reportPrivateUsage]
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """The body of a request: what a user and an assistant said in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, **more}


def writer(store: Store, folder: Path, *, store_seconds: float = 0.01, **more: Any) -> StoreWriter:
    """What stores the turns of a server."""
    options = {"run_id": "demo:serve", "metrics": ServingMetrics(), "store_seconds": store_seconds}
    return StoreWriter(store, folder, **options, **more)


async def recorded(
    sessions: Sessions, name: str | None, *, group: str | None = None, policy: Policy | None = None
) -> Session:
    """Record one turn of a session."""
    messages = chat("1+1=")["messages"]
    answers = await (policy or ScriptedPolicy(["4"])).generate(messages)
    with sessions.request(name, group) as session:
        return await sessions.record(session, messages, None, answers, response_id=f"r-{name}")


@asynccontextmanager
async def kept(
    store: Store, folder: Path, policy: Policy, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose rows go to a store."""
    chosen, keeper = ServeConfig(commit_interval=0.01, **settings), writer(store, folder)
    sessions = new_sessions(keeper, chosen)
    app = create_app(
        policy,
        settings=chosen,
        sessions=sessions,
        check=keeper.check,
        answered=keeper.answered,
        feedback=Feedback(store, sessions, keeper),
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
        yield client
    await sessions.close()
    assert await asyncio.to_thread(keeper.close, seconds=20)
