"""The explorers of a run on Ray: start them, restart those that die, and add more on request."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....store.errors import ConfigError, JobError
from ...rollouts.workers import RolloutWorker, WorkerPool
from ...runs.job import Job
from ...runs.placement_group import reserved
from ...runs.ray import NAMESPACE, answer, connected, end, here, wanted
from ...weight_sync import started_from
from .actor import RolloutActor, WorkerSpec
from .autoscaler import Autoscaler
from .scale_up import JoinRegistry, register_name
from .worker import RayWorker, States

CALLS = 16
"""Calls, other than groups, that an explorer may have in progress."""

_log = logging.getLogger(__name__)


class RayWorkerPool:
    """Starts the explorers of a run, restarts those that die, and ends them."""

    def __init__(self, job: Job) -> None:
        config = job.config
        assert config.ray is not None, "a run on Ray has its section in the configuration"
        self._job, self._cluster = job, config.ray
        self._spec = WorkerSpec(
            config=config,
            max_concurrent_rollouts=share(
                config.explorer and config.explorer.max_concurrent_rollouts,
                self._cluster.max_explorers or self._cluster.num_explorers,
            ),
            paths=tuple(path for path in sys.path if path),
            store=job.store.uri,
            storage_options=job.store.storage_options or {},
        )
        self.workers: list[RayWorker] = []
        """Those that are alive, as far as is known."""
        self._deaths: dict[str, int] = {}
        self._states, self._stack = States(), ExitStack()
        self._folder = job.folder
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, folder: Path, pool: WorkerPool) -> None:
        """Start the explorers with the model of a folder, and add them to a pool, as later ones.

        Raises JobError if the cluster cannot be reached, or has no room for them.
        """
        self._folder = folder
        self._ray = await asyncio.to_thread(self._stack.enter_context, connected(self._cluster))
        place = reserved(self._job.config, trainer=False)
        self._room = await asyncio.to_thread(self._stack.enter_context, place)
        self._register = (
            self._ray.remote(JoinRegistry)
            .options(
                name=register_name(self._job.run_id),
                namespace=NAMESPACE,
                num_cpus=0,
                scheduling_strategy=here(),
            )
            .remote()
        )
        await self.more(self._cluster.num_explorers, pool)
        self._tasks.append(asyncio.create_task(self._grow(pool)))

    async def restore(self, lost: RolloutWorker) -> RayWorker:
        """Restart an explorer that died, on another node if its own was lost.

        Raises JobError after too many deaths, or without room for it in time;
        WorkerLostError if it dies again.
        """
        self.workers = [one for one in self.workers if one is not lost]
        deaths = self._deaths[lost.name] = self._deaths.get(lost.name, 0) + 1
        if deaths > self._cluster.max_restarts:
            raise JobError(f"it died {deaths} times, and `ray.max_restarts` is {deaths - 1}")
        made = await self._start(lost.name)
        self.workers.append(made)
        return made

    async def close(self) -> None:
        """End all explorers, and leave the cluster."""
        for task in self._tasks:
            task.cancel()
        for worker in self.workers:
            await worker.close()
        self.workers = []
        await asyncio.to_thread(self._stack.close)

    async def more(self, count: int, pool: WorkerPool) -> None:
        """Start explorers and add them to the pool; raise the first error once all have ended."""
        first = len(self._deaths)  # counts all that were ever started, so that names are unique
        names = [f"explorer-{first + i}" for i in range(count)]
        self._deaths |= dict.fromkeys(names, 0)
        made = await asyncio.gather(*map(self._start, names), return_exceptions=True)
        ready = [one for one in made if not isinstance(one, BaseException)]
        self.workers += ready
        added = await asyncio.gather(
            *(self._added(worker, pool) for worker in ready), return_exceptions=True
        )
        failed = [one for one in (*made, *added) if isinstance(one, BaseException)]
        if failed:
            raise failed[0]

    async def _added(self, worker: RayWorker, pool: WorkerPool) -> None:
        """Add an explorer to the pool, or end it."""
        try:
            await pool.add(worker)
        except BaseException:
            self.workers.remove(worker)
            await worker.close()
            raise

    def _index(self, name: str) -> int:
        """Return an explorer's place in the order in which they were first started."""
        return list(self._deaths).index(name)

    async def _start(self, name: str) -> RayWorker:
        """Start an explorer. Raises JobError if it is not ready in time."""
        cluster = self._cluster
        remote = self._ray.remote(RolloutActor).options(
            **self._room.of_explorer(cluster, self._index(name)),
            max_restarts=0,  # a restart by Ray would lose the groups silently; see `restore`
            max_concurrency=cluster.max_concurrent_groups + CALLS,
        )
        actor = remote.remote(self._spec)
        # Looked up at each start: the folder of the first one may have been removed meanwhile.
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

    async def _grow(self, pool: WorkerPool) -> None:
        while True:
            number, count = await answer(self._register.next.remote(), "register")
            try:
                await self.more(count, pool)
                message: Any = len(pool)
            except JobError as error:
                _log.warning("%s", error)
                message = str(error)
            await answer(self._register.answer.remote(number, message), "register")

    def scaled(
        self, pool: WorkerPool, demand: Callable[[], Awaitable[int]]
    ) -> Callable[[], dict[str, float]]:
        """Follow the demand of the trainer, if configured; return what gives the metrics."""
        if self._cluster.max_explorers is None:
            return lambda: {"explore/explorers": float(len(pool))}

        async def grow() -> None:
            await self.more(1, pool)

        async def shrink() -> None:
            ended = await pool.remove([w for w in self.workers if self._index(w.name) >= first])
            self.workers = [one for one in self.workers if one is not ended]

        # Those that the run began with have bundles, which nothing else could use.
        first = self._cluster.num_explorers
        scaler = Autoscaler(self._cluster, pool=pool, grow=grow, shrink=shrink, demand=demand)
        self._tasks.append(asyncio.create_task(scaler.run()))
        return scaler.metrics


async def start_ray_workers(
    job: Job, folder: Path, demand: Callable[[], Awaitable[int]]
) -> tuple[WorkerPool, Callable[[], dict[str, float]]]:
    """Start the explorers of a run on Ray, as a pool that more may join.

    Their number follows the trainer's `demand`, if configured; the second value gives the metrics
    of that.
    """
    explorers = RayWorkerPool(job)
    pool = WorkerPool(
        [], restore=explorers.restore, closing=explorers.close, patience=job.config.schedule.timeout
    )
    try:
        await explorers.start(folder, pool)
    except BaseException:
        await explorers.close()
        raise
    return pool, explorers.scaled(pool, demand)


def share(max_concurrent_rollouts: int | None, explorers: int) -> int | None:
    """Return each explorer's share of the concurrent rollouts.

    >>> share(7, 3), share(None, 3)
    (2, None)

    Raises ConfigError when that is none.
    """
    if max_concurrent_rollouts is None:
        return None
    if max_concurrent_rollouts < explorers:
        raise ConfigError(
            f"`explorer.max_concurrent_rollouts` is {max_concurrent_rollouts}, and there are "
            f"{explorers} explorers; lower `ray.num_explorers`"
        )
    return max_concurrent_rollouts // explorers
