"""Workers run groups, in this process or others, while their weights are updated."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...store.records import Experience, Task
from ..inference.build import close
from ..inference.cancellation import CancelScope, cancel_scope
from ..inference.chat_policy import ChatPolicy
from ..inference.endpoint.policy import EndpointPolicy
from ..inference.engine import Sleeper
from ..models.weights import Weights
from ..runs.job import WorkerLostError
from ..weight_sync import WeightsLostError, fetch
from .group import RolloutSpec, run_group

W = TypeVar("W")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupRequest:
    """A group to run: a task, and its index in the explorer's batch or in an evaluation."""

    task: Task
    batch: int
    index: int
    evaluation_id: str | None = None
    """The run_id of an evaluation's rows; None: rows to train on."""

    @property
    def key(self) -> tuple[str | None, int, int]:
        """Its key among all groups under way."""
        return self.evaluation_id, self.batch, self.index


class RolloutWorker(Protocol):
    """Runs groups concurrently. All methods are called from the explorer's event loop."""

    name: str
    version: int
    """The version of its weights; -1 before it has any."""

    async def update_weights(self, weights: Weights) -> None:
        """Replace the weights; groups under way continue with the new ones."""
        ...

    async def sleep(self) -> None:
        """Free the GPU's memory until the next group, if the engine is configured to."""
        ...

    async def run_group(self, request: GroupRequest) -> Sequence[Experience]:
        """Run a group and return its rows. Raises WorkerLostError if the worker dies."""
        ...

    def stop(self, request: GroupRequest, reason: str) -> None:
        """Cancel a group's rollouts: their rows have what was sampled, and the reason."""
        ...

    async def close(self) -> None:
        """Free all resources."""
        ...


class LocalWorker:
    """Runs groups in this process."""

    name = "local"

    def __init__(
        self,
        policy: ChatPolicy | EndpointPolicy,
        spec_of: Callable[[Task], RolloutSpec],
        eval_spec_of: Callable[[Task, str], RolloutSpec],
        *,
        auxiliary: Collection[ChatPolicy | EndpointPolicy] = (),
    ) -> None:
        """Run groups with a policy; `auxiliary` policies are closed with it.

        `spec_of` returns how a task is run, `eval_spec_of` how for the evaluation with a run_id.
        """
        self._policy, self._spec_of, self._eval_spec_of = policy, spec_of, eval_spec_of
        self._auxiliary = auxiliary
        self._scopes: dict[GroupRequest, CancelScope] = {}
        self.version = -1

    async def update_weights(self, weights: Weights) -> None:
        """Replace the weights of the engine; an endpoint keeps its own."""
        if isinstance(self._policy, ChatPolicy):
            await self._policy.engine.swap(await fetch(weights))
        self.version = weights.version

    async def sleep(self) -> None:
        """Free the GPU's memory until the next group, if the engine is configured to."""
        if isinstance(self._policy, ChatPolicy) and isinstance(self._policy.engine, Sleeper):
            await self._policy.engine.sleep()

    async def run_group(self, request: GroupRequest) -> list[Experience]:
        """Run a group and return its rows."""
        task, evaluation = request.task, request.evaluation_id
        spec = self._spec_of(task) if evaluation is None else self._eval_spec_of(task, evaluation)
        scope = self._scopes[request] = CancelScope()
        try:
            with cancel_scope(scope):
                return await run_group(
                    task, self._policy, spec, batch=request.batch, group_index=request.index
                )
        finally:
            del self._scopes[request]

    def stop(self, request: GroupRequest, reason: str) -> None:
        """Cancel the rollouts of a group."""
        if (scope := self._scopes.get(request)) is not None:
            scope.set(reason)

    async def close(self) -> None:
        """Close the engines."""
        await close([self._policy, *self._auxiliary])


def least_busy(busy: Mapping[W, Sized]) -> W:
    """Return the worker with the fewest groups, the first of several."""
    return min(busy, key=lambda one: len(busy[one]))


class WorkerPool:
    """The workers of a run: each group goes to the one with the fewest groups."""

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        *,
        restore: Callable[[RolloutWorker], Awaitable[RolloutWorker]] | None = None,
        closing: Callable[[], Awaitable[None]] | None = None,
        patience: float = 300.0,
    ) -> None:
        """Use workers; `restore` restarts one that died, and raises an error if it cannot.

        The others go on without it. `closing` is called after all workers are closed. A worker
        that joins while the current weights are lost waits `patience` seconds for others.
        """
        self._closing, self._patience = closing, patience
        self._busy: dict[RolloutWorker, list[GroupRequest]] = {worker: [] for worker in workers}
        self._restore = restore
        self._restoring: set[asyncio.Task[None]] = set()
        self._weights: Weights | None = None
        self._are_lost, self._updated = False, asyncio.Event()
        self.when_lost: Callable[[Weights], None] = lambda weights: None
        """Called with weights that a worker could not receive."""
        self._leaving: dict[RolloutWorker, asyncio.Event] = {}
        self._lost: Exception | None = None
        """Why the last worker that was lost is not there."""

    def __len__(self) -> int:
        return len(self._busy)

    @property
    def version(self) -> int:
        """The oldest version with which a group that is started now may begin."""
        known = -1 if self._weights is None or self._are_lost else self._weights.version
        return min((worker.version for worker in self._busy), default=known)

    @property
    def restoring(self) -> int:
        """The number of workers that are being restored."""
        return len(self._restoring)

    @property
    def under_way(self) -> int:
        """The number of groups under way."""
        return sum(len(requests) for requests in self._busy.values())

    async def add(self, worker: RolloutWorker) -> None:
        """Add a worker, once it has the current weights.

        If these are lost, it waits for others; raises WeightsLostError if none come in time.
        """
        # A loop: newer weights may be published while these are loaded.
        while (weights := self._weights) is not None and worker.version != weights.version:
            updated = self._updated
            try:
                await worker.update_weights(weights)
            except WeightsLostError as error:
                self._lose(weights)
                _log.warning("`%s` waits for other weights: %s", worker.name, error)
                try:
                    await asyncio.wait_for(updated.wait(), self._patience)
                except TimeoutError:
                    raise error from None
        self._busy[worker] = []

    def _lose(self, weights: Weights) -> None:
        self._are_lost |= weights is self._weights
        self.when_lost(weights)

    async def remove(self, among: Collection[RolloutWorker]) -> RolloutWorker | None:
        """Close the least busy of some workers, once its groups have ended; None if none is left.

        It gets no other groups meanwhile, but new weights like the others.
        """
        some = {one: busy for one, busy in self._busy.items() if one in among}
        if not some:
            return None
        worker = least_busy(some)
        self._leaving[worker] = ended = asyncio.Event()
        try:
            while self._busy.get(worker):
                ended.clear()
                await ended.wait()
        finally:
            del self._leaving[worker]
        self._busy.pop(worker, None)  # it may have died
        await worker.close()
        return worker

    async def update_weights(self, weights: Weights) -> None:
        """Replace the weights of all workers; one that dies is restored, while the others go on.

        Raises the first error of the others, once all have ended: some have the new weights then.
        """
        # First: a worker that joins meanwhile must load these.
        self._weights, self._are_lost = weights, False
        self._updated.set()
        self._updated = asyncio.Event()

        async def update(worker: RolloutWorker) -> None:
            try:
                await worker.update_weights(weights)
            except WeightsLostError:
                self._lose(weights)
                raise
            except WorkerLostError as error:
                self._replace(worker, error)

        ended = await asyncio.gather(*map(update, list(self._busy)), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    async def sleep(self) -> None:
        """Free the GPU memory of all workers until their next groups."""

        async def sleep(worker: RolloutWorker) -> None:
            try:
                await worker.sleep()
            except WorkerLostError as error:
                self._replace(worker, error)

        await asyncio.gather(*map(sleep, list(self._busy)))

    async def run_group(self, request: GroupRequest) -> Sequence[Experience]:
        """Run a group on a worker, and on another one if it dies.

        Raises an error, as WorkerLostError, if no worker is left.
        """
        while True:
            worker = await self._choose()
            self._busy[worker].append(request)
            try:
                return await worker.run_group(request)
            except WorkerLostError as error:
                self._replace(worker, error)
            finally:
                # The worker may have been replaced meanwhile.
                if request in (busy := self._busy.get(worker, [])):
                    busy.remove(request)
                if worker in self._leaving:
                    self._leaving[worker].set()

    def stop(self, request: GroupRequest, reason: str) -> None:
        """Cancel the rollouts of a group."""
        for worker, busy in self._busy.items():
            if request in busy:
                worker.stop(request, reason)

    async def close(self) -> None:
        """Close all workers."""
        for task in self._restoring:
            task.cancel()
        for worker in self._busy:
            await worker.close()
        if self._closing is not None:
            await self._closing()

    async def _choose(self) -> RolloutWorker:
        """Return the worker with the fewest groups, or wait for one that is being restored."""
        while not self._busy:
            if not self._restoring:
                raise self._lost or WorkerLostError("no worker is left")
            await asyncio.wait(self._restoring, return_when=asyncio.FIRST_COMPLETED)
        staying = {one: busy for one, busy in self._busy.items() if one not in self._leaving}
        return least_busy(staying or self._busy)

    def _replace(self, worker: RolloutWorker, error: WorkerLostError) -> None:
        """Restart a worker that died, once, while the others go on."""
        if worker not in self._busy:
            return  # another of its groups noticed first
        del self._busy[worker]
        self._lost = error
        if self._restore is not None and worker not in self._leaving:
            task = asyncio.create_task(self._restored(worker, self._restore))
            self._restoring.add(task)
            task.add_done_callback(self._restoring.discard)

    async def _restored(
        self, lost: RolloutWorker, restore: Callable[[RolloutWorker], Awaitable[RolloutWorker]]
    ) -> None:
        worker = lost
        while True:
            try:
                worker = await restore(worker)
                return await self.add(worker)
            except WorkerLostError:
                continue  # it died again; `restore` counts how often
            except Exception as error:  # noqa: BLE001 - the run fails with it if no worker is left
                self._lost = error
                if worker is not lost:
                    await worker.close()
                _log.warning(
                    "`%s` is not restarted; the run has %d of its explorers left: %s",
                    lost.name,
                    len(self),
                    error,
                )
                return None
