"""Autoscaling: more explorers while the trainer waits for rows, fewer while they wait for it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from statistics import fmean

from ....store.errors import JobError
from ...config import RayConfig
from ...rollouts.workers import WorkerPool

SAMPLES = 20
"""How often the demand is looked at before each decision."""
THRESHOLD = 0.5
"""Mean demand beyond which the number of explorers changes."""

_log = logging.getLogger(__name__)


class Autoscaler:
    """Starts or ends at most one explorer in each `scale_interval`, within the given limits.

    Growing asks Ray for an actor, and an actor that waits for resources is what Ray's own
    autoscaler, where the cluster has one, starts nodes for.
    """

    def __init__(
        self,
        cluster: RayConfig,
        *,
        pool: WorkerPool,
        grow: Callable[[], Awaitable[None]],
        shrink: Callable[[], Awaitable[None]],
        demand: Callable[[], Awaitable[int]],
    ) -> None:
        """Change the explorers of a pool by `grow` and `shrink`, one at a time.

        `grow` raises JobError without room. `demand` is 1 while the trainer waits for rows,
        -1 while explorers are ahead as far as they may be, and else 0.
        """
        self._cluster, self._pool, self._demand = cluster, pool, demand
        self._grow, self._shrink = grow, shrink
        self._changed = 0
        self._last: float | None = None

    async def run(self) -> None:
        """Decide again and again, until cancelled."""
        while True:
            try:
                await self.decide()
            except Exception as error:  # noqa: BLE001 - the run goes on with those that it has
                _log.warning("the number of explorers stays as it is for now: %s", error)
                await asyncio.sleep(self._cluster.scale_interval)

    async def decide(self) -> None:
        """Watch the demand for one interval, then start or end an explorer, or neither."""
        demands, busiest = [], 0
        for _ in range(SAMPLES):
            await asyncio.sleep(self._cluster.scale_interval / SAMPLES)
            demands.append(await self._demand())
            busiest = max(busiest, self._pool.under_way)
        self._last, count = fmean(demands), len(self._pool)
        most = self._cluster.max_explorers or count
        # With no more groups than explorers, another one would have nothing to do.
        has_room = count + self._pool.restoring < most
        if self._last > THRESHOLD and has_room and busiest > count:
            try:
                await self._grow()
            except JobError as error:
                _log.warning("no further explorer was started: %s", error)
            else:
                self._changed += 1
                _log.info("the trainer waits for rows: %d explorers", len(self._pool))
        elif self._last < -THRESHOLD and count > self._cluster.num_explorers:
            await self._shrink()
            self._changed -= len(self._pool) < count
            _log.info("the trainer has all rows that it may: %d explorers", len(self._pool))

    def metrics(self) -> dict[str, float]:
        """Return the demand at the last decision and the changes since the last call."""
        there = {"explore/explorers": float(len(self._pool))}
        if self._last is None:
            return there
        changed, self._changed = self._changed, 0
        return {**there, "explore/scale/demand": self._last, "explore/scale/change": float(changed)}
