"""A runner whose engine is in another process on Ray."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....store.records import Experience
from ...models.weights import Weights
from ...rollouts.workers import GroupRequest
from ...runs.ray import answer, end, ray_module


class States:
    """Weights in memory, put once where all explorers read them; of the newest versions only."""

    def __init__(self, *, keep: int = 2) -> None:
        self._keep = keep
        self._put: dict[tuple[int, str], Any] = {}

    async def reference(self, weights: Weights) -> Any:
        """Return a reference to the tensors, None when weights do not come in memory."""
        if weights.state is None:
            return None
        key = (weights.version, weights.digest)
        if key not in self._put:
            from safetensors.torch import save

            data = await asyncio.to_thread(save, dict(weights.state))
            self._put[key] = ray_module().put(data)
            for old in list(self._put)[: -self._keep]:
                del self._put[old]
        return self._put[key]


class RayWorker:
    """Tries groups in an actor; `max_concurrent_groups` of them, the others wait here."""

    def __init__(
        self,
        name: str,
        actor: Any,
        *,
        host: str,
        pid: int,
        max_concurrent_groups: int,
        states: States,
    ) -> None:
        self.name, self.host, self.pid = name, host, pid
        self._actor, self._states = actor, states
        self._room = asyncio.Semaphore(max_concurrent_groups)
        self._version = -1

    @property
    def version(self) -> int:
        """The version of the weights that it samples with; -1 before it has any."""
        return self._version

    async def update_weights(self, weights: Weights) -> None:
        """Take in other weights; LostRunnerError when the actor dies meanwhile."""
        state = await self._states.reference(weights)
        await self._answer(self._actor.update_weights.remote(replace(weights, state=None), state))
        self._version = weights.version

    async def run_group(self, assignment: GroupRequest) -> Sequence[Experience]:
        """Try a group and return its rows; LostRunnerError when the actor dies meanwhile."""
        async with self._room:
            call = self._actor.run_group.remote(assignment.task, assignment.key)
            return await self._answer(call)

    def stop(self, assignment: GroupRequest, reason: str) -> None:
        """End a group's tries now."""
        self._actor.stop.remote(assignment.key, reason)

    async def close(self) -> None:
        """End the actor, with what it is doing."""
        end(self._actor)

    async def _answer(self, reference: Any) -> Any:
        return await answer(reference, self.name)
