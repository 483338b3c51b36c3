"""Exploring without batches: groups begin while they may still be fresh, and are stored at once."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from math import inf
from time import perf_counter

from ...store import Experience
from ...store.errors import JobError, StarvedError
from ..inference.cancellation import STOP_SECONDS
from ..rollouts.workers import GroupRequest, WorkerPool
from ..weight_sync import PublishedWeights
from .context import ExploreContext

END_SECONDS = 10.0
"""How long it may take to store what was under way at the end; tries end long before."""


class StreamingExploration:
    """Keeps as many groups under way as the schedule allows, with the newest weights there are.

    A group is begun when the training step that will take it up, if all go on as fast, is at most
    `max_ahead` steps ahead of the weights. Groups that filters empty, or that fail, make room for
    others. Weights are replaced while answers are sampled.
    """

    def __init__(self, context: ExploreContext) -> None:
        self._context = context
        self._under_way: dict[asyncio.Task[list[Experience]], GroupRequest] = {}
        self._finished: list[list[Experience]] = []
        self._batch = 1
        self._noted = 0
        self._idle_since = perf_counter()
        self._started = perf_counter()

    async def explore(self, first: int) -> int:
        """Explore from the first batch that is not whole; return the one behind the last begun."""
        context, ended = self._context, threading.Event()
        self._news = asyncio.get_running_loop().create_future()
        assignments = self._assignments(first)
        newest = await self._newer(-1, ended, seconds=context.config.schedule.timeout)
        team = await context.workers(newest.folder)
        await context.evaluate_until(newest.version)
        await team.update_weights(newest.weights)
        following = asyncio.create_task(self._follow(team, ended))
        try:
            while context.pacer.step <= context.steps and not context.stop.is_set():
                self._begin(team, assignments)
                await self._wait(following)
            await self._end(team)
        finally:
            ended.set()
            following.cancel()
            for task in self._under_way:
                task.cancel()
        self._note(last=True)
        return self._batch + 1

    def _assignments(self, first: int) -> Iterator[GroupRequest]:
        """Yield the groups that are not stored yet, batch by batch."""
        stored = self._context.stored_places()
        self._batch = first
        while True:
            there = stored.pop(self._batch, {})
            whole = self._context.first_batch() if self._context.curriculum.learns else None
            for place, task in enumerate(self._context.curriculum.batch(self._batch, whole=whole)):
                if place not in there:
                    yield GroupRequest(task=task, step=self._batch, index=place)
            self._batch += 1

    def _begin(self, team: WorkerPool, assignments: Iterator[GroupRequest]) -> None:
        """Begin groups while they are wanted."""
        context = self._context
        while context.pacer.admits(len(self._under_way) * context.units_per_group, team.version):
            assignment = next(assignments)
            self._under_way[asyncio.create_task(self._one(team, assignment))] = assignment

    async def _one(self, team: WorkerPool, assignment: GroupRequest) -> list[Experience]:
        return await self._context.writer.add(await team.run_group(assignment))

    async def _wait(self, following: asyncio.Task[None]) -> None:
        """Wait until a group is stored, or there are newer weights."""
        context = self._context
        done, _ = await asyncio.wait(
            {*self._under_way, following, self._news},
            timeout=STOP_SECONDS,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if following in done:
            following.result()
        if self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        self._take([task for task in self._under_way if task in done])
        context.watch.check("train")
        if done or self._under_way or context.is_evaluating:
            self._idle_since = perf_counter()
        if perf_counter() - self._idle_since > context.config.schedule.timeout:
            raise StarvedError(
                f"gave up after {context.config.schedule.timeout:g} s: {self._described()}"
            )

    def _take(self, done: "Sequence[asyncio.Task[list[Experience]]]") -> None:
        """Count groups that are stored."""
        for task in done:
            del self._under_way[task]
            self._finished.append(task.result())
        if done:
            self._context.pace()
            self._note()

    async def _end(self, team: WorkerPool) -> None:
        """Stop what is under way, and store what was sampled of it."""
        stopped = self._context.stop.is_set()
        why = "the run was stopped" if stopped else "the run has all that it needs"
        for assignment in self._under_way.values():
            team.stop(assignment, why)
        if self._under_way and not stopped:
            done, _ = await asyncio.wait(self._under_way, timeout=END_SECONDS)
            for task in done:  # what is stopped here says nothing of the workflow
                del self._under_way[task]
                self._finished.append(task.result())

    def _note(self, *, last: bool = False) -> None:
        """Store the numbers of as many groups as a batch has, and at the end of the others."""
        context, size = self._context, self._context.batch_tasks
        while len(self._finished) >= size or (last and self._finished):
            groups, self._finished = self._finished[:size], self._finished[size:]
            rows = [row for group in groups for row in group]
            self._noted += 1
            context.note(self._noted, rows, perf_counter() - self._started)
            self._started = perf_counter()
            if not last:
                context.check(rows)

    async def _follow(self, team: WorkerPool, ended: threading.Event) -> None:
        """Replace the weights whenever newer ones are published.

        Those that are measured are kept until that is done, while groups begin as they may.
        """
        while not ended.is_set():
            newer = await self._newer(team.version, ended, seconds=inf)
            await self._context.evaluate_until(newer.version)
            await team.update_weights(newer.weights)
            if not self._news.done():
                self._news.set_result(None)

    async def _newer(
        self, version: int, ended: threading.Event, *, seconds: float
    ) -> PublishedWeights:
        context = self._context

        def look() -> PublishedWeights | None:
            if context.stop.is_set() and not ended.is_set():
                raise JobError("the run was stopped")
            found = context.subscriber.latest()
            if found is not None and found.version > version:
                return found
            context.watch.check("train")
            return None

        return await asyncio.to_thread(
            context.job.store.wait_for,
            look,
            tables=("policies", "job_events"),
            seconds=seconds,
            describe=self._described,
            stop=ended,
        )

    def _described(self) -> str:
        context = self._context
        return (
            f"the explorer needs a policy newer than version {context.subscriber.newest} of run "
            f"`{context.job.run_id}`; is `rlake train` running?"
        )
