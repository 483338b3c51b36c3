"""What runs in an explorer's process on Ray: an engine, and the groups that it tries."""

import asyncio
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....store import Experience, Task
from ...config import RunConfig
from ...models.weights import Weights
from ...rollouts.workers import GroupRequest, LocalWorker
from ...trajectories.rows import fitting, standing_in

Place = tuple[str | None, int, int]
"""A group's key: the measurement or None, the batch, and the place there."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What every explorer of a run must know; it travels to where they work."""

    config: RunConfig
    group_size: int
    greedy_tries: int
    max_concurrent_rollouts: int | None
    """Its share of `explorer.max_concurrent_rollouts`."""
    paths: tuple[str, ...]
    """Where modules of workflows and rewards are found."""


class RolloutActor:
    """Tries groups in a process of its own."""

    def __init__(self, terms: WorkerSpec) -> None:
        sys.path.extend(path for path in terms.paths if path not in sys.path)
        self._terms = terms
        self._runner: LocalWorker | None = None
        self._under_way: dict[Place, GroupRequest] = {}
        self._stopped: dict[Place, str] = {}

    async def start(self, folder: str) -> tuple[str, int]:
        """Start the engine with the model of a folder; return the host and the process."""
        self._runner = await asyncio.to_thread(_runner, self._terms, Path(folder))
        return os.uname().nodename, os.getpid()

    async def update_weights(self, weights: Weights, state: bytes | None) -> None:
        """Take in other weights: from a folder, as safetensors, or from who sends them."""
        if state is not None:
            from safetensors.torch import load

            weights = replace(weights, state=load(state), folder=None)
        await self._mine.update_weights(weights)

    async def run_group(self, task: Task, place: Place) -> list[Experience]:
        """Try a group and return its rows, those that are too large replaced."""
        measured_as, step, number = place
        assignment = GroupRequest(task=task, step=step, index=number, evaluation_id=measured_as)
        work = asyncio.ensure_future(self._mine.run_group(assignment))
        self._under_way[place] = assignment
        try:
            if place in self._stopped:
                asyncio.get_running_loop().call_soon(self.stop_now, place)
            return bounded(await work, self._most)
        finally:
            work.cancel()
            self._under_way.pop(place, None)
            self._stopped.pop(place, None)

    async def stop(self, place: Place, reason: str) -> None:
        """End a group's tries now, or as soon as they begin."""
        self._stopped[place] = reason
        self.stop_now(place)

    def stop_now(self, place: Place) -> None:
        """End a group's tries, if they are under way."""
        if place in self._under_way:
            self._mine.stop(self._under_way[place], self._stopped[place])

    async def close(self) -> None:
        """Free what the engine holds."""
        if self._runner is not None:
            await self._runner.close()

    @property
    def _mine(self) -> LocalWorker:
        assert self._runner is not None, "the engine is started before anything else is asked"
        return self._runner

    @property
    def _most(self) -> int:
        assert self._terms.config.ray is not None
        return self._terms.config.ray.max_group_bytes


def _runner(terms: WorkerSpec, folder: Path) -> LocalWorker:
    import torch

    from ...rollouts.setup import start_runner, trying

    config = terms.config
    if config.threads:
        torch.set_num_threads(config.threads)
    how = trying(config, terms.group_size, greedy_tries=terms.greedy_tries)
    if terms.max_concurrent_rollouts is not None:
        how = replace(how, places=asyncio.Semaphore(terms.max_concurrent_rollouts))
    return start_runner(config, how, folder)


def bounded(rows: Sequence[Experience], most: int) -> list[Experience]:
    """Return a group's rows; when they have more than `most` bytes, the largest without content.

    These say so in their `drop_reason`, as do rows that the table would not take: what is in them
    may be nothing that travels.
    """
    rows = fitting(rows)
    sizes = [len(pickle.dumps(row)) for row in rows]
    kept: list[Any] = list(rows)
    for i in sorted(range(len(rows)), key=sizes.__getitem__, reverse=True):
        if sum(sizes) <= most:
            break
        kept[i] = _without_content(rows[i], sizes[i], most)
        sizes[i] = 0
    return kept


def _without_content(row: Experience, size: int, most: int) -> Experience:
    message = f"the row has {size} bytes, and a group may have {most}: raise `ray.max_group_bytes`"
    return standing_in(row, message, policy_version=row.policy_version)
