"""Batched exploration: each batch is sampled with the weights that the schedule sets for it."""

import asyncio
from math import ceil, floor, inf
from time import perf_counter

from ...store import Experience
from ...store.errors import JobError
from ..inference.cancellation import STOP_SECONDS
from ..rollouts.workers import GroupRequest, WorkerPool
from .context import ExploreContext

SHARED_SECONDS = 0.25
"""Groups that end this soon after a chunk begins share one commit, unless all have ended."""


class BatchedExploration:
    """Runs the groups of a batch, or of a chunk of it, concurrently; each is stored when it ends.

    After a kill, a chunk with missing groups runs again as a whole, so that the engine's batches,
    and thus the samples, are the same; stored groups are not stored again.
    """

    def __init__(self, context: ExploreContext) -> None:
        self._context = context
        self._stored = context.stored_groups()

    async def explore(self, batch: int) -> int:
        """Explore from a batch on; return the batch after the last one stored."""
        context = self._context
        while context.pacer.step <= context.steps and not context.stop.is_set():
            started = perf_counter()
            rows = await self._batch(batch)
            if context.stop.is_set():
                break
            context.note(batch, rows, perf_counter() - started)
            context.check(rows) if rows else None
            batch += 1
        return batch

    async def _batch(self, batch: int) -> list[Experience]:
        context = self._context
        tasks = list(enumerate(context.curriculum.batch(batch)))
        size = context.explorer.tasks_per_chunk or context.batch_tasks
        there = self._stored.pop(batch, {})
        rows: list[Experience] = []
        for first in range(0, len(tasks), size):
            chunk = [
                GroupRequest(task=t, batch=batch, index=p) for p, t in tasks[first : first + size]
            ]
            missing = {a for a in chunk if a.index not in there}
            if missing:
                # Before the update below: an evaluation may load other weights.
                await context.evaluate_until(context.pacer.version)
                begun = [there[a.index] for a in chunk if there.get(a.index) is not None]
                version = min(begun, default=context.pacer.version)
                pool = await self._with_weights(version)
                is_last = first + size >= len(tasks)
                rows += await self._run(pool, version, chunk, missing, is_last=is_last)
                context.pace()
        return rows

    async def _run(
        self,
        pool: WorkerPool,
        version: int,
        chunk: list[GroupRequest],
        missing: set[GroupRequest],
        *,
        is_last: bool,
    ) -> list[Experience]:
        """Run groups, store those that are missing, and return their rows in order."""
        context, over = self._context, self._context.explorer.oversampling
        made: dict[GroupRequest, list[Experience]] = {}
        enough, usable, running = self._enough(len(chunk)), 0, len(chunk)
        # Short groups end at about the same time, and a commit for each would take
        # longer than they do.
        begun = asyncio.Event()
        asyncio.get_running_loop().call_later(SHARED_SECONDS, begun.set)

        async def one(request: GroupRequest) -> None:
            nonlocal usable, running
            rows = await pool.run_group(request)
            running -= 1
            if not running:
                # Before these are stored: with the last rows the trainer's step begins.
                if is_last and context.explorer.engine.sleeps:
                    await pool.sleep()
                begun.set()
            await begun.wait()
            made[request] = stored = await context.writer.add(rows) if request in missing else []
            # groups that were stored before the kill count too
            usable += any(row.drop_reason is None for row in stored or rows)

        tasks = {asyncio.create_task(one(a)): a for a in chunk}
        pending = set(tasks)
        deadline = inf
        try:
            while pending:
                left = max(0.0, min(STOP_SECONDS, deadline - perf_counter()))
                done, pending = await asyncio.wait(
                    pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                if context.stop.is_set():
                    raise JobError(f"the run was stopped during batch {chunk[0].batch}")
                if pool.version < 0:  # these weights were lost, and with them all workers
                    await self._with_weights(version)
                if over and deadline == inf and usable >= enough:
                    deadline = perf_counter() + over.grace_period
                if perf_counter() >= deadline:
                    for task in pending:
                        pool.stop(tasks[task], "enough others of the batch were finished")
                    # Only once: the groups that were stopped are still awaited, for what they have.
                    over, deadline = None, inf
        finally:
            for task in pending:
                task.cancel()
        return [row for request in chunk for row in made[request]]

    def _enough(self, groups: int) -> int:
        """Return how many groups of a chunk are needed; oversampling runs more."""
        over = self._context.explorer.oversampling
        # Rounded down for a whole batch, which was rounded up to leave room for the others, and up
        # for a chunk, so that all chunks together are enough. 1e-9: quotients are not exact.
        share = groups / (1 + over.ratio) if over else groups
        whole = groups == self._context.batch_tasks
        return floor(share + 1e-9) if whole else ceil(share - 1e-9)

    async def _with_weights(self, version: int) -> WorkerPool:
        """Return the workers with the weights of `version`, once these are published."""
        context = self._context
        known = context.pool
        if known is not None and known.version == version:
            context.watch.check("train")  # rows for a trainer that failed would never be drawn
            return known
        while True:
            weights = await context.weights(version)
            pool = await context.workers(weights.folder)
            if await context.update(pool, weights):
                return pool
