"""The Ray actor of an explorer: an engine, and the groups that it runs."""

import asyncio
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ....store import Experience, Store, Task, connect
from ....store.errors import JobError, StoreError
from ...config import RunConfig
from ...models.weights import Weights
from ...rollouts.workers import GroupRequest, LocalWorker
from ...rollouts.writer import fitting, standing_in

Key = tuple[str | None, int, int]
"""A group's key: the evaluation or None, the batch, and the index in it."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What every worker of a run needs to start, in any process."""

    config: RunConfig
    max_concurrent_rollouts: int | None
    """Its share of `explorer.max_concurrent_rollouts`."""
    paths: tuple[str, ...]
    """The import path of workflows and rewards."""
    store: str
    """The address of the store, from which images are read."""
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)


class RolloutActor:
    """Runs groups in a separate process."""

    def __init__(self, spec: WorkerSpec) -> None:
        sys.path.extend(path for path in spec.paths if path not in sys.path)
        self._spec = spec
        self._started: LocalWorker | None = None
        self._under_way: dict[Key, GroupRequest] = {}
        self._stopped: dict[Key, str] = {}

    async def start(self, folder: str) -> tuple[str, int]:
        """Start the engine with the model of a folder; return the host and the process id.

        Raises JobError where the node does not have the folder that the engine needs.
        """
        try:
            self._started = await asyncio.to_thread(_worker, self._spec, Path(folder))
        except Exception as error:
            if Path(folder).is_dir():
                raise
            raise JobError(
                f"`{folder}` is not on node `{os.uname().nodename}`, where an explorer reads its "
                "model from it; set `output` to a folder that all nodes share"
            ) from error
        return os.uname().nodename, os.getpid()

    async def update_weights(self, weights: Weights, state: bytes | None) -> None:
        """Replace the weights: from a folder, by safetensors in `state`, or from an address."""
        if state is not None:
            from safetensors.torch import load

            weights = replace(weights, state=load(state))
        await self._worker.update_weights(weights)

    async def sleep(self) -> None:
        """Free the GPU's memory until the next group."""
        await self._worker.sleep()

    async def run_group(self, task: Task, key: Key) -> list[Experience]:
        """Run a group and return its rows, without the content of those that are too large."""
        evaluation, batch, index = key
        request = GroupRequest(task=task, batch=batch, index=index, evaluation_id=evaluation)
        work = asyncio.ensure_future(self._worker.run_group(request))
        self._under_way[key] = request
        try:
            # Ray may deliver `stop` before this call; then it takes effect once `work` has begun.
            if key in self._stopped:
                asyncio.get_running_loop().call_soon(self.stop_now, key)
            assert self._spec.config.ray is not None, "an actor belongs to a run on Ray"
            return bounded(await work, self._spec.config.ray.max_group_bytes)
        finally:
            work.cancel()
            self._under_way.pop(key, None)
            self._stopped.pop(key, None)

    async def stop(self, key: Key, reason: str) -> None:
        """Cancel the rollouts of a group now, or as soon as they begin."""
        self._stopped[key] = reason
        self.stop_now(key)

    def stop_now(self, key: Key) -> None:
        """Cancel the rollouts of a group, if they are in progress."""
        if key in self._under_way:
            self._worker.stop(self._under_way[key], self._stopped[key])

    async def close(self) -> None:
        """Free the engine."""
        if self._started is not None:
            await self._started.close()

    @property
    def _worker(self) -> LocalWorker:
        assert self._started is not None, "`start` is called first"
        return self._started


def _worker(spec: WorkerSpec, folder: Path) -> LocalWorker:
    from ...models.images import reads_images
    from ...models.threads import use_threads
    from ...rollouts.setup import RolloutSpecs, start_worker

    config = spec.config
    use_threads(config)
    specs = RolloutSpecs(config, max_concurrent_rollouts=spec.max_concurrent_rollouts)
    return start_worker(config, specs, folder, _store(spec, needed=reads_images(folder)))


def _store(spec: WorkerSpec, *, needed: bool) -> Store | None:
    """Open the store; None where this node does not reach it and the model reads text alone."""
    try:
        return connect(spec.store, create=False, storage_options=spec.storage_options)
    except StoreError as error:
        if not needed:
            return None
        raise JobError(
            f"`{spec.store}` cannot be opened on node `{os.uname().nodename}`, where an explorer "
            f"reads images from it ({error}); put the store into a folder that all nodes share, or "
            "on S3"
        ) from error


def bounded(rows: Sequence[Experience], most: int) -> list[Experience]:
    """Return a group's rows; beyond `most` bytes, the largest without their content.

    Their `drop_reason` says so, as it does for rows that do not fit the table, whose content may
    not be serializable.
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
