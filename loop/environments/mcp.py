"""Model Context Protocol servers as tools: the rollouts of a process share one of each."""

import asyncio
import atexit
import json
import os
from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from ...store.errors import ConfigError, JobError, first_invalid, missing_extra
from ..config.base import Float, Section
from ..inference.event_loop import run_on, shared_loop
from .tools import Tool

if TYPE_CHECKING:
    from mcp import Client

MOST_STARTS = 5
"""Most consecutive starts of a server without a successful call."""
_MOST_PAGES = 20


class McpServer(Section):
    """A server: a process that communicates over its standard streams, or a URL."""

    command: tuple[str, ...] = ()
    """The program and its arguments."""
    url: str | None = None
    """Instead of a command, the URL of a server over streamable HTTP."""
    env: dict[str, str] = Field(default={})
    """Added to the process's few environment variables."""
    folder: str | None = None
    """The working directory of the process."""
    log: str | None = None
    """The file to which its error stream is appended; None discards it."""
    token_env: str | None = None
    """The environment variable with the bearer token for the URL."""
    tools: tuple[str, ...] | None = None
    """The tools to offer; None for all."""
    start_seconds: Float = Field(default=30.0, gt=0)
    """Timeout for starting and listing the tools."""

    @model_validator(mode="after")
    def _one(self) -> "McpServer":
        if bool(self.command) == bool(self.url):
            raise ValueError("needs a `command` or a `url`, and not both")
        return self


async def mcp_tools(servers: Mapping[str, McpServer | Mapping[str, Any]]) -> list[Tool]:
    """Return the tools of servers, which are started on first use.

    Raises ConfigError for an invalid server, JobError for one that does not start.
    """
    found = await asyncio.gather(*(_shared(n, spec).tools() for n, spec in servers.items()))
    return [one for tools in found for one in tools]


async def close_servers() -> None:
    """Stop all servers; they are started again on their next use."""
    servers = list(_known.values())
    _known.clear()
    await asyncio.gather(*(run_on(one.stop()) for one in servers))


def _shared(name: str, spec: "McpServer | Mapping[str, Any]") -> "_Running":
    try:
        checked = spec if isinstance(spec, McpServer) else McpServer.model_validate(dict(spec))
    except ValidationError as error:
        where, message, _ = first_invalid(error)
        place = f" at `{where}`" if where else ""
        raise ConfigError(f"the MCP server `{name}`{place}: {message}") from error
    # by all settings: two configurations may give one name to two servers
    key = json.dumps([name, checked.model_dump(mode="json")], sort_keys=True)
    return _known.setdefault(key, _Running(name, checked))


class _Running:
    """A server and the connection to it, which belong to the shared background loop."""

    def __init__(self, name: str, spec: McpServer) -> None:
        self._name, self._spec = name, spec
        self._starts = 0
        self._client: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[tuple[Client, list[Tool]]] | None = None
        self._end: asyncio.Event | None = None

    async def tools(self) -> list[Tool]:
        """Return the server's tools; may be called from any loop."""
        return (await run_on(self._connected()))[1]

    async def stop(self) -> None:
        """Close the connection and end the process; runs in the background loop."""
        mine = self._client
        if mine is not None and self._end is not None:
            self._end.set()
            await asyncio.wait({mine}, timeout=10.0)
        if self._client is mine:  # otherwise a new connection was started in the meantime
            self._client = None

    async def _connected(self) -> "tuple[Client, list[Tool]]":
        if self._client is None or self._client.done() or self._ready is None:
            if self._starts >= MOST_STARTS:
                raise JobError(f"the MCP server `{self._name}` was started {MOST_STARTS} times")
            self._starts += 1
            self._ready = asyncio.get_running_loop().create_future()
            self._end = asyncio.Event()
            self._client = asyncio.create_task(self._live(self._ready, self._end))
        # Shielded: a cancelled rollout must not cancel the start that others wait for.
        return await asyncio.shield(self._ready)

    async def _live(
        self, ready: "asyncio.Future[tuple[Client, list[Tool]]]", end: asyncio.Event
    ) -> None:
        """Open, hold and close the connection in one task.

        The client's cancel scopes must be exited in the task that entered them.
        """
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._spec.start_seconds):
                    client = await self._start(stack)
                    tools = await self._listed(client)
                ready.set_result((client, tools))
                await end.wait()
        except Exception as error:  # noqa: BLE001 - the boundary to others' servers: the caller gets the error
            if not ready.done():
                ready.set_exception(self._no_start(error))
                ready.exception()  # marks it as retrieved: there may be no caller left

    def _no_start(self, error: BaseException) -> JobError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        late = f"it did not answer within {self._spec.start_seconds:g} s"
        message = late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return JobError(f"the MCP server `{self._name}` cannot be used: {message}")

    async def _start(self, stack: AsyncExitStack) -> "Client":
        try:
            from mcp import Client
        except ImportError as error:
            raise missing_extra("mcp", "environments") from error
        return await stack.enter_async_context(Client(await self._transport(stack)))

    async def _transport(self, stack: AsyncExitStack) -> Any:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        spec = self._spec
        if spec.url:
            return await self._address(stack, spec.url)
        log = stack.enter_context(Path(spec.log or os.devnull).open("a"))  # noqa: SIM115
        program = StdioServerParameters(
            command=spec.command[0], args=list(spec.command[1:]), env=spec.env, cwd=spec.folder
        )
        return stdio_client(program, errlog=log)

    async def _address(self, stack: AsyncExitStack, url: str) -> Any:
        from mcp.client.streamable_http import streamable_http_client

        if self._spec.token_env is None:
            return streamable_http_client(url)
        import httpx2

        token = os.environ.get(self._spec.token_env)
        if not token:
            raise ConfigError(f"the environment variable `{self._spec.token_env}` is not set")
        client = httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"})
        return streamable_http_client(url, http_client=await stack.enter_async_context(client))

    async def _listed(self, client: "Client") -> list[Tool]:
        found, cursor = [], None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        wanted = self._spec.tools
        missing = set(wanted or ()) - {one.name for one in found}
        if missing:
            raise ConfigError(f"it has no tool `{min(missing)}`")
        return [self._tool(one) for one in found if wanted is None or one.name in wanted]

    def _tool(self, one: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            return await run_on(self._call(one.name, arguments))

        return Tool(
            name=one.name,
            description=one.description or one.name,
            parameters=one.input_schema,
            function=call,
        )

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool; after a broken connection, the next call opens a new one."""
        client, _ = await self._connected()
        mine = self._client
        try:
            result = await client.call_tool(name, arguments)
        except Exception:
            if not await self._answers(client) and self._client is mine:
                await self.stop()
            raise
        self._starts = 0  # it works, so only consecutive failed starts count
        text = "\n".join(_said(block) for block in result.content)
        if result.is_error:
            raise JobError(text)
        return text

    async def _answers(self, client: "Client") -> bool:
        try:
            async with asyncio.timeout(self._spec.start_seconds):
                await client.list_tools(cache_mode="bypass")
        except Exception:  # noqa: BLE001 - any error means that it does not answer
            return False
        return True


_known: dict[str, _Running] = {}


def _said(block: Any) -> str:
    text = getattr(block, "text", None)
    return text if isinstance(text, str) else f"[{getattr(block, 'type', 'content')}]"


@atexit.register
def _stop_all() -> None:
    wait([shared_loop().submit(one.stop()) for one in _known.values()], timeout=10.0)
