"""A worker whose engine is in another process on Ray."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....store.records import Experience
from ...models.weights import Weights
from ...rollouts.workers import GroupRequest
from ...runs.ray import answer, end, ray_module


class States:
    """Weights in Ray's object store, put once for all workers; the newest versions only."""

    def __init__(self, *, keep: int = 2) -> None:
        self._keep = keep
        self._put: dict[tuple[int, str], Any] = {}

    async def reference(self, weights: Weights) -> Any:
        """Return a reference to the tensors; None for weights that are not in memory."""
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
    """Runs at most `max_concurrent_groups` groups in an actor; others wait here."""

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
        self.version = -1

    async def update_weights(self, weights: Weights) -> None:
        """Replace the weights. Raises WorkerLostError if the actor dies."""
        state = await self._states.reference(weights)
        # Without the tensors, which the arguments of each call would copy.
        call = self._actor.update_weights.remote(replace(weights, state=None), state)
        await answer(call, self.name)
        self.version = weights.version

    async def sleep(self) -> None:
        """Free the GPU's memory. Raises WorkerLostError if the actor dies."""
        await answer(self._actor.sleep.remote(), self.name)

    async def run_group(self, request: GroupRequest) -> Sequence[Experience]:
        """Run a group and return its rows. Raises WorkerLostError if the actor dies."""
        async with self._room:
            call = self._actor.run_group.remote(request.task, request.key)
            return await answer(call, self.name)

    def stop(self, request: GroupRequest, reason: str) -> None:
        """Cancel the rollouts of a group."""
        self._actor.stop.remote(request.key, reason)

    async def close(self) -> None:
        """End the actor and its work."""
        end(self._actor)
