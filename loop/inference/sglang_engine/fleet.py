"""Several SGLang servers: which have the weights that are served, and which are gone."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

from ....store.errors import ConfigError, JobError
from ...config.engines import SglangEngine as Settings
from ..incoming_weights import IncomingWeights
from ..policy import PolicyError
from ..shared_tensors import SharedBlock
from .failures import AGAIN_SECONDS, BusyError, LostError
from .server import Labeled, Server

CLOSE_SECONDS = 2.0
"""Longest wait for requests under way when the engine is closed."""
MOST_SECONDS = 10.0
"""Longest time between two attempts."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Served(Labeled):
    """The weights that answer requests sent now."""

    weights: IncomingWeights


class Fleet:
    """The servers of one engine, used in one event loop."""

    def __init__(self, settings: Settings, first: IncomingWeights) -> None:
        """Serve the first weights."""
        self._settings = settings
        self.servers = [Server(url, settings) for url in settings.urls]
        # Another engine's first weights are of version 0 too, with other tensors.
        self._id = uuid4().hex
        self.labels: set[str] = set()
        """The labels of all weights so far."""
        self.served = self.labeled(first)
        self._incoming: Served | None = None
        self._revivals: dict[Server, asyncio.Task[None]] = {}

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together, of the server that takes the fewest."""
        return min(server.max_length for server in self.servers)

    def labeled(self, weights: IncomingWeights) -> Served:
        """Return weights with the label that tells them from any other engine's.

        Those in memory are copied: servers may read them for as long as they are served.
        """
        label = json.dumps([weights.version, weights.digest, self._id])
        self.labels.add(label)
        if weights.state is None:
            assert weights.file is not None, "weights are in a file or in memory"
            return Served(label=label, folder=weights.file.parent, weights=weights)
        block = SharedBlock()
        block.write(weights.state)
        return Served(label=label, block=block, weights=replace(weights, state=None))

    async def connect(self, folder: Path, *, dtype: str, trust: bool) -> None:
        """Look at all servers, and give them the first weights; see `Server.connect`."""
        for server in self.servers:
            await server.connect(folder, dtype=dtype, trust=trust)
        await self._give_all(self.served)
        for server in self.servers:
            await server.check_labels(self.served.label)

    async def replace(self, new: Served) -> None:
        """Give new weights to all servers, which are served from then on.

        Raises JobError if a server refuses them; those before are served then.
        """
        self._incoming = new
        try:
            await self._give_all(new)
            self.served = new
        finally:
            # If it failed, servers that have the new ones are given the old ones again.
            self._incoming = None

    def current(self) -> set[str]:
        """Return the labels of the weights that requests may be answered with now."""
        return {one.label for one in (self.served, self._incoming) if one is not None}

    async def repeated(
        self, attempt: Callable[[Server], Awaitable[T | None]], ended: asyncio.Event
    ) -> T | None:
        """Attempt something at servers until it has a result; None if it is to end before.

        The request timeout is for the attempts, the restart timeout for each wait for a server.
        """
        longest = self._settings.request_timeout
        spent, pause, why = 0.0, 0.0, ""
        while True:
            ready = asyncio.create_task(self._ready())
            try:
                if not await is_first(ready, ended):
                    return None
                server = ready.result()
            except ConfigError:
                raise
            except JobError as error:
                raise PolicyError(str(error)) from error
            finally:
                ready.cancel()
            began = monotonic()
            try:
                async with asyncio.timeout(longest - spent):
                    try:
                        if (found := await attempt(server)) is not None:
                            return found
                    except BusyError as error:
                        why = f" ({error})"
                    except LostError as error:
                        why, server.label = f" ({error})", None
                    # The first time at once.
                    waiting = asyncio.create_task(asyncio.sleep(pause))
                    await is_first(waiting, ended)
                    waiting.cancel()
            except TimeoutError:
                raise PolicyError(
                    f"SGLang did not answer in {longest:g} s{why}; look at the server's log, "
                    "or raise `request_timeout`"
                ) from None
            pause = min(max(2 * pause, AGAIN_SECONDS), MOST_SECONDS)
            spent += monotonic() - began

    async def close(self, *, waits: bool) -> None:
        """Close the connections; if it `waits`, requests under way end before."""
        for task in self._revivals.values():
            task.cancel()
        # One in the midst of an update tells its server to go on before it ends.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others and (waits or self._revivals):
            await asyncio.wait(others, timeout=CLOSE_SECONDS)
        for server in self.servers:
            await server.close()

    async def _give_all(self, new: Served) -> None:
        """Give all servers the weights; of several, one that is gone gets them when it is back."""
        lost = await self._given(new)
        deadline = monotonic() + self._settings.restart_timeout
        while len(lost) == len(self.servers):
            if monotonic() >= deadline:
                raise self._waited(lost[0])
            await asyncio.sleep(AGAIN_SECONDS)
            lost = await self._given(new)
        for error in lost:
            _log.warning("%s; version %d is sampled without it", error, new.weights.version)

    async def _given(self, new: Served) -> list[LostError]:
        work = (self._give(server, new) for server in self.servers)
        done = await asyncio.gather(*work, return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException) and not isinstance(result, LostError):
                raise result
        return [result for result in done if isinstance(result, LostError)]

    async def _give(self, server: Server, new: Served | None = None) -> None:
        """Give a server new weights; or, if it has neither them nor these, those that are served.

        A swap alone gives new ones: those may be refused, and then nobody else is to give them.
        """
        async with server.changing:
            # Read here: they may have changed while this waited.
            given = new or self.served
            if server.label in ({given.label} if new else self.current()):
                return
            try:
                await server.reach()
                await server.load(given, self.served)
            except JobError as error:
                if isinstance(error, LostError):
                    server.label = None
                is_served = server.label in self.current()
                server.trouble = None if is_served else error
                raise
            server.trouble = None

    async def _revive(self, server: Server) -> None:
        """Try to give a server the weights that are served until it has them."""
        while True:
            try:
                return await self._give(server)
            except LostError:
                await asyncio.sleep(AGAIN_SECONDS)
            except JobError as error:
                _log.warning("%s; it is tried again in %g s", error, MOST_SECONDS)
                await asyncio.sleep(MOST_SECONDS)

    async def _ready(self) -> Server:
        """Return the least busy server with current weights, and see to the others.

        Raises LostError if there is none for longer than the restart timeout, JobError if it
        refuses the weights. A change of weights is waited for.
        """
        began = monotonic()
        while True:
            current = self.current()
            known = [one for one in self.servers if one.label in current]
            for server in self.servers:
                task = self._revivals.get(server)
                if server not in known and (task is None or task.done()):
                    self._revivals[server] = asyncio.create_task(self._revive(server))
            if known:
                return min(known, key=lambda one: one.busy)
            troubles = [one.trouble for one in self.servers if one.trouble is not None]
            if len(troubles) == len(self.servers):
                for trouble in troubles:
                    if not isinstance(trouble, LostError):
                        raise trouble
                if monotonic() - began >= self._settings.restart_timeout:
                    raise self._waited(troubles[0])
            done, _ = await asyncio.wait(
                [self._revivals[one] for one in self.servers],
                timeout=AGAIN_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                task.result()

    def _waited(self, error: JobError) -> LostError:
        return LostError(
            f"{error}; it was waited for {self._settings.restart_timeout:g} s "
            "(`restart_timeout`); look at its log, and start it again"
        )


async def is_first(task: "asyncio.Task[Any]", ended: asyncio.Event) -> bool:
    """Wait for a task, and return whether it was done before it is to end."""
    ending = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([task, ending], return_when=asyncio.FIRST_COMPLETED)
        return task.done() and not ended.is_set()
    finally:
        ending.cancel()
