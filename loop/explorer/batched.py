"""Exploring batch after batch, each with the weights due to it, whoever is fast."""

import asyncio
from collections.abc import Sequence
from math import ceil, floor, inf
from time import perf_counter

from ...store import Experience
from ...store.errors import JobError
from ..inference.cancellation import STOP_SECONDS
from ..rollouts.workers import GroupRequest, WorkerPool
from .context import ExploreContext


class BatchedExploration:
    """Tries the groups of a batch, or of a part of it, together; each is stored when it finishes.

    A part whose groups are not all stored when the explorer dies is tried again as a whole, so that
    it comes out as it would have; groups that are stored stay as they are.
    """

    def __init__(self, context: ExploreContext) -> None:
        self._context = context
        self._stored = context.stored_places()

    async def explore(self, batch: int) -> int:
        """Explore from a batch on; return the one behind the last that was stored."""
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
            part = [
                GroupRequest(task=t, step=batch, index=p) for p, t in tasks[first : first + size]
            ]
            missing = {a for a in part if a.index not in there}
            if missing:
                await context.evaluate_until(context.pacer.version)
                begun = [there[a.index] for a in part if there.get(a.index) is not None]
                team = await self._with_weights(min(begun, default=context.pacer.version))
                rows += await self._try(team, part, missing)
                context.pace()
        return rows

    async def _try(
        self, team: WorkerPool, part: list[GroupRequest], missing: set[GroupRequest]
    ) -> list[Experience]:
        """Try groups, store those that are missing, and return their rows in order."""
        context, over = self._context, self._context.explorer.oversampling
        made: dict[GroupRequest, list[Experience]] = {}
        enough, usable = self._enough(len(part)), 0

        async def one(assignment: GroupRequest) -> None:
            nonlocal usable
            rows = await team.run_group(assignment)
            made[assignment] = stored = (
                await context.writer.add(rows) if assignment in missing else []
            )
            usable += _usable(stored or rows)  # what is stored already counts too

        tasks = {asyncio.create_task(one(a)): a for a in part}
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
                    raise JobError(f"the run was stopped while batch {part[0].step} was tried")
                if over and deadline == inf and usable >= enough:
                    deadline = perf_counter() + over.grace_period
                if perf_counter() >= deadline:
                    for task in pending:
                        team.stop(tasks[task], "enough others of the batch were finished")
                    over, deadline = None, inf
        finally:
            for task in pending:
                task.cancel()
        return [row for assignment in part for row in made[assignment]]

    def _enough(self, groups: int) -> int:
        """Return how many of a part's groups make up what a batch needs."""
        over = self._context.explorer.oversampling
        share = groups / (1 + over.ratio) if over else groups
        whole = groups == self._context.batch_tasks
        return floor(share + 1e-9) if whole else ceil(share - 1e-9)

    async def _with_weights(self, version: int) -> WorkerPool:
        """Return the runners with the weights of `version`, waiting until they are published."""
        context = self._context
        known = context.pool
        if known is not None and known.version == version:
            context.watch.check("train")  # what is made for a trainer that failed, nobody draws
            return known
        weights = await context.weights(version)
        team = await context.workers(weights.folder)
        await team.update_weights(weights.weights)
        return team


def _usable(rows: Sequence[Experience]) -> bool:
    return any(row.drop_reason is None for row in rows)
