"""The explorers of a run on Ray: started, started again when they die, and more when asked for."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....store.errors import ConfigError, JobError
from ...rollouts.group import RolloutSpec
from ...rollouts.workers import RolloutWorker, WorkerPool
from ...runs.job import Job, WorkerLostError
from ...runs.ray import NAMESPACE, answer, connected, end, options, wanted
from ...weight_sync import started_from
from .actor import RolloutActor, WorkerSpec
from .join import register_name
from .registry import JoinRegistry
from .worker import RayWorker, States

CALLS = 16
"""Calls beside groups that an explorer may have under way."""

_log = logging.getLogger(__name__)


class RayWorkerPool:
    """Starts the explorers of a run, keeps count of those that died, and ends them."""

    def __init__(self, job: Job, *, group_size: int, greedy_tries: int = 0) -> None:
        config = job.config
        assert config.ray is not None, "a fleet has its section in the configuration"
        self._job, self._cluster = job, config.ray
        self._terms = WorkerSpec(
            config=config,
            group_size=group_size,
            greedy_tries=greedy_tries,
            max_concurrent_rollouts=share(
                config.explorer and config.explorer.max_concurrent_rollouts,
                self._cluster.num_explorers,
            ),
            paths=tuple(path for path in sys.path if path),
        )
        self.runners: list[RayWorker] = []
        """Those that work, as far as is known."""
        self._deaths: dict[str, int] = {}
        self._states, self._stack = States(), ExitStack()
        self._folder = job.folder
        self._growing: asyncio.Task[None] | None = None

    async def start(
        self, folder: Path, *, add: Callable[[RolloutWorker], Awaitable[None]] | None = None
    ) -> list[RayWorker]:
        """Start the explorers with the model of a folder; return them when all are ready.

        `add` is given those that join later. Raises JobError when the cluster cannot be reached, or
        has no room for them.
        """
        self._folder = folder
        self._ray = await asyncio.to_thread(self._stack.enter_context, connected(self._cluster))
        self._register = (
            self._ray.remote(JoinRegistry)
            .options(name=register_name(self._job.run_id), namespace=NAMESPACE, num_cpus=0)
            .remote()
        )
        await self._more(self._cluster.num_explorers)
        if add is not None:
            self._growing = asyncio.create_task(self._grow(add))
        return list(self.runners)

    async def restore(self, lost: RolloutWorker) -> RayWorker | None:
        """Start an explorer that died again; None when it did so too often."""
        self.runners = [one for one in self.runners if one is not lost]
        deaths = self._deaths[lost.name] = self._deaths.get(lost.name, 0) + 1
        if deaths > self._cluster.max_restarts:
            _log.warning("`%s` died %d times, and is not started again", lost.name, deaths)
            return None
        try:
            made = await self._start(lost.name)
        except WorkerLostError as error:
            _log.warning("%s", error)
            return None
        self.runners.append(made)
        return made

    async def close(self) -> None:
        """End all explorers, and leave the cluster."""
        if self._growing is not None:
            self._growing.cancel()
        for runner in self.runners:
            await runner.close()
        self.runners = []
        await asyncio.to_thread(self._stack.close)

    async def _more(self, count: int) -> list[RayWorker]:
        first = len(self._deaths)
        names = [f"explorer-{first + i}" for i in range(count)]
        self._deaths |= dict.fromkeys(names, 0)
        made = await asyncio.gather(*map(self._start, names), return_exceptions=True)
        ready = [one for one in made if isinstance(one, RayWorker)]
        self.runners += ready
        failed = [one for one in made if isinstance(one, BaseException)]
        if failed:
            raise failed[0]
        return ready

    async def _start(self, name: str) -> RayWorker:
        """Start an explorer; raises JobError when it does not get ready in time."""
        cluster = self._cluster
        remote = self._ray.remote(RolloutActor).options(
            **options(cluster),
            max_restarts=0,  # what it was doing would be gone; a new one is started instead
            max_concurrency=cluster.max_concurrent_groups + CALLS,
            scheduling_strategy="SPREAD",
        )
        actor = remote.remote(self._terms)
        folder = await asyncio.to_thread(started_from, self._job, self._folder)
        try:
            async with asyncio.timeout(cluster.startup_timeout):
                host, pid = await answer(actor.start.remote(str(folder)), name)
        except BaseException as error:
            end(actor)
            if isinstance(error, TimeoutError):
                raise JobError(
                    f"`{name}` was not ready after `ray.startup_timeout`, "
                    f"{cluster.startup_timeout:g} s; {wanted(cluster)}"
                ) from error
            raise
        return RayWorker(
            name,
            actor,
            host=host,
            pid=pid,
            max_concurrent_groups=cluster.max_concurrent_groups,
            states=self._states,
        )

    async def _grow(self, add: Callable[[RolloutWorker], Awaitable[None]]) -> None:
        """Start more explorers when somebody asks for them."""
        while True:
            number, count = await answer(self._register.next.remote(), "register")
            try:
                for runner in await self._more(count):
                    await add(runner)
                message: Any = len(self.runners)
            except JobError as error:
                _log.warning("%s", error)
                message = str(error)
            await answer(self._register.tell.remote(number, message), "register")


async def start_fleet(job: Job, how: RolloutSpec, folder: Path) -> WorkerPool:
    """Start the explorers of a run on Ray, as a team that more may join."""
    fleet = RayWorkerPool(job, group_size=how.group_size, greedy_tries=how.greedy_tries)
    team = WorkerPool([], restore=fleet.restore, closing=fleet.close)
    try:
        for runner in await fleet.start(folder, add=team.add):
            await team.add(runner)
    except BaseException:
        await fleet.close()
        raise
    return team


def share(max_concurrent_rollouts: int | None, explorers: int) -> int | None:
    """Return how many tries each explorer may have under way.

    >>> share(7, 3), share(None, 3)
    (2, None)

    Raises ConfigError when that is none.
    """
    if max_concurrent_rollouts is None:
        return None
    if max_concurrent_rollouts < explorers:
        raise ConfigError(
            f"`explorer.max_concurrent_rollouts` is {max_concurrent_rollouts}, and there are "
            f"{explorers} explorers; "
            "lower `ray.num_explorers`"
        )
    return max_concurrent_rollouts // explorers
