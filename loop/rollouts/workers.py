"""Runners try groups of a run, here or elsewhere, and follow its weights meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...store.records import Experience, Task
from ..inference.build import close
from ..inference.cancellation import CancelScope, cancel_scope
from ..inference.chat_policy import ChatPolicy
from ..inference.endpoint.policy import EndpointPolicy
from ..models.weights import Weights
from ..runs.job import WorkerLostError
from ..weight_sync import fetch
from .group import RolloutSpec, run_group


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupRequest:
    """A group to be tried: a task, and its place in the explorer's batch, or in a measurement."""

    task: Task
    step: int
    index: int
    evaluation_id: str | None = None
    """The run_id of the measurement's rows; None: these are explored, to be trained on."""

    @property
    def key(self) -> tuple[str | None, int, int]:
        """Names it among all that are under way."""
        return self.evaluation_id, self.step, self.index


class RolloutWorker(Protocol):
    """Tries groups, several at once. All methods are called from the explorer's event loop."""

    name: str

    @property
    def version(self) -> int:
        """The version of the weights that it samples with; -1 before it has any."""
        ...

    async def update_weights(self, weights: Weights) -> None:
        """Take in other weights; groups under way go on with them."""
        ...

    async def run_group(self, assignment: GroupRequest) -> Sequence[Experience]:
        """Try a group and return its rows; LostRunnerError when the runner dies meanwhile."""
        ...

    def stop(self, assignment: GroupRequest, reason: str) -> None:
        """End a group's tries now: it returns what was sampled, with the reason."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


class LocalWorker:
    """Tries groups in this process, with a policy that speaks through an engine."""

    name = "local"

    def __init__(
        self,
        policy: ChatPolicy | EndpointPolicy,
        trying: RolloutSpec,
        *,
        beside: Collection[ChatPolicy | EndpointPolicy] = (),
        measuring: Callable[[Task, str], RolloutSpec] | None = None,
    ) -> None:
        """Try with a policy; those `beside` are closed with it.

        `measuring` gives how a task is tried for a measurement of this run_id.
        """
        self._policy, self._trying, self._measuring = policy, trying, measuring
        self._beside = beside
        self._stops: dict[GroupRequest, CancelScope] = {}
        self._version = -1

    @property
    def version(self) -> int:
        """The version of the weights that it samples with."""
        return self._version

    async def update_weights(self, weights: Weights) -> None:
        """Take in other weights."""
        if isinstance(self._policy, ChatPolicy):  # an endpoint's weights are not ours
            await self._policy.engine.swap(await fetch(weights))
        self._version = weights.version

    async def run_group(self, assignment: GroupRequest) -> list[Experience]:
        """Try a group and return its rows."""
        stop = self._stops[assignment] = CancelScope()
        try:
            with cancel_scope(stop):
                return await run_group(
                    assignment.task,
                    self._policy,
                    self._how(assignment),
                    step=assignment.step,
                    place=assignment.index,
                )
        finally:
            del self._stops[assignment]

    def _how(self, assignment: GroupRequest) -> RolloutSpec:
        if assignment.evaluation_id is None:
            return self._trying
        assert self._measuring is not None, "who lets it measure says how"
        return self._measuring(assignment.task, assignment.evaluation_id)

    def stop(self, assignment: GroupRequest, reason: str) -> None:
        """End a group's tries now."""
        if (stop := self._stops.get(assignment)) is not None:
            stop.set(reason)

    async def close(self) -> None:
        """Close the engines."""
        await close([self._policy, *self._beside])


class WorkerPool:
    """The runners of a run: each group goes to the one that has least to do."""

    def __init__(
        self,
        runners: Sequence[RolloutWorker],
        *,
        restore: Callable[[RolloutWorker], Awaitable[RolloutWorker | None]] | None = None,
        closing: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`restore` starts a runner that died again, or returns None when it may not.

        `closing` is called when all runners are closed.
        """
        self._closing = closing
        self._busy: dict[RolloutWorker, list[GroupRequest]] = {runner: [] for runner in runners}
        self._restore = restore
        self._restoring: set[asyncio.Task[None]] = set()
        self._weights: Weights | None = None

    def __len__(self) -> int:
        return len(self._busy)

    @property
    def version(self) -> int:
        """The version that a group which is tried now begins with, at least."""
        known = -1 if self._weights is None else self._weights.version
        return min((runner.version for runner in self._busy), default=known)

    @property
    def under_way(self) -> int:
        """Groups that are tried now."""
        return sum(len(assignments) for assignments in self._busy.values())

    async def add(self, runner: RolloutWorker) -> None:
        """Let one more runner take groups."""
        while self._weights is not None and runner.version != self._weights.version:
            await runner.update_weights(self._weights)  # there may be newer ones by then
        self._busy[runner] = []

    async def update_weights(self, weights: Weights) -> None:
        """Give all runners other weights; one that dies of it is restored."""
        self._weights = weights

        async def follow(runner: RolloutWorker) -> None:
            try:
                await runner.update_weights(weights)
            except WorkerLostError as error:
                await self._replace(runner, error)

        await asyncio.gather(*map(follow, list(self._busy)))

    async def run_group(self, assignment: GroupRequest) -> Sequence[Experience]:
        """Let a runner try a group, another one when it dies.

        Raises LostRunnerError when no runner is left.
        """
        while True:
            runner = await self._choose()
            self._busy[runner].append(assignment)
            try:
                return await runner.run_group(assignment)
            except WorkerLostError as error:
                await self._replace(runner, error)
            finally:
                if assignment in (busy := self._busy.get(runner, [])):
                    busy.remove(assignment)

    def stop(self, assignment: GroupRequest, reason: str) -> None:
        """End a group's tries now."""
        for runner, busy in self._busy.items():
            if assignment in busy:
                runner.stop(assignment, reason)

    async def close(self) -> None:
        """Close all runners."""
        for task in self._restoring:
            task.cancel()
        for runner in self._busy:
            await runner.close()
        if self._closing is not None:
            await self._closing()

    async def _choose(self) -> RolloutWorker:
        """Return the runner with least to do, waiting for one that is being restored."""
        while not self._busy:
            if not self._restoring:
                raise WorkerLostError("no runner is left that could try groups")
            await asyncio.wait(self._restoring)
        return min(self._busy, key=lambda one: len(self._busy[one]))

    async def _replace(self, runner: RolloutWorker, error: WorkerLostError) -> None:
        """Put another runner in the place of one that died, once; the others go on meanwhile."""
        if runner not in self._busy:
            return  # another of its groups saw it first
        del self._busy[runner]
        task = asyncio.create_task(self._restored(runner))
        self._restoring.add(task)
        task.add_done_callback(self._restoring.discard)
        await asyncio.shield(task)
        if not self._busy and not self._restoring:
            raise error

    async def _restored(self, lost: RolloutWorker) -> None:
        runner = await self._restore(lost) if self._restore is not None else None
        while runner is not None and self._restore is not None:
            try:
                return await self.add(runner)
            except WorkerLostError:
                runner = await self._restore(runner)
