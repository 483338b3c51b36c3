"""Explorers that are started but cannot join the pool end; those beside them stay."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import config

from rlake.loop.explorer.ray.pool import RayWorkerPool
from rlake.loop.explorer.ray.worker import RayWorker, States
from rlake.loop.models.weights import Weights
from rlake.loop.rollouts.workers import WorkerPool
from rlake.loop.runs.job import Job, WorkerLostError
from rlake.store import Store

FIRST = Weights(version=1, digest="one")


class Worker(RayWorker):
    """A worker without an actor, which may die when it gets weights."""

    is_closed = False

    def __init__(self, name: str, *, dies: bool) -> None:
        here: dict[str, Any] = {"host": "here", "pid": 1, "max_concurrent_groups": 1}
        super().__init__(name, None, **here, states=States())
        self.dies = dies

    async def update_weights(self, weights: Weights) -> None:
        if self.dies:
            raise WorkerLostError(f"`{self.name}` died")
        self.version = weights.version

    async def close(self) -> None:
        self.is_closed = True


class Explorers(RayWorkerPool):
    """Starts workers without a cluster; the first one dies before it joins."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.made: list[Worker] = []

    async def _start(self, name: str) -> RayWorker:
        self.made.append(Worker(name, dies=name == "explorer-0"))
        return self.made[-1]


def test_an_explorer_that_dies_before_it_joins_is_ended_and_the_others_join(
    store: Store, tmp_path: Path
):
    async def went() -> None:
        explorers = Explorers(Job(store, config(ray={}), "explore", 1, tmp_path))
        pool = WorkerPool([])
        await pool.update_weights(FIRST)
        with pytest.raises(WorkerLostError, match="`explorer-0` died"):
            await explorers.more(2, pool)
        dead, joined = explorers.made
        assert (dead.is_closed, joined.is_closed) == (True, False)
        assert explorers.workers == [joined]
        assert (len(pool), pool.version) == (1, 1)

    asyncio.run(went())
