"""Streaming exploration: groups start while they can still be fresh, and are stored as they end."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from time import perf_counter

from ...store import Experience
from ...store.errors import JobError, StarvedError
from ..inference.cancellation import STOP_SECONDS
from ..rollouts.workers import GroupRequest, WorkerPool
from ..weight_sync import PublishedWeights
from .context import ExploreContext

FOLLOW_SECONDS = 5.0
"""How soon older weights are loaded where the current ones turn out to be lost."""
END_SECONDS = 10.0
"""Longest time to store what was in progress at the end; rollouts end long before."""


class StreamingExploration:
    """Keeps as many groups under way as the schedule allows, with the newest weights.

    A group starts if the training step that will use it, at the current pace, is at most
    `max_ahead` steps ahead of the weights. Groups that fail, or that filters empty, make room for
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
        """Explore from the first incomplete batch; return the batch after the last one begun."""
        context, ended = self._context, threading.Event()
        self._news = asyncio.get_running_loop().create_future()
        requests = self._requests(first)
        newest = await self._newer(-1, ended, seconds=context.config.schedule.timeout)
        pool = await context.workers(newest.folder)
        await context.evaluate_until(newest.version)
        # evaluation swaps weights, so the newest ones are restored after it
        while not await context.update(pool, newest):
            newest = await self._newer(-1, ended, seconds=context.config.schedule.timeout)
        following = asyncio.create_task(self._follow(pool, ended))
        try:
            while context.pacer.step <= context.steps and not context.stop.is_set():
                self._begin(pool, requests)
                await self._wait(following)
            await self._end(pool)
        finally:
            # The event comes first: cancelling a task does not end the thread that it waits for.
            ended.set()
            following.cancel()
            for task in self._under_way:
                task.cancel()
        self._note(last=True)
        return self._batch + 1

    def _requests(self, first: int) -> Iterator[GroupRequest]:
        """Yield the groups that are not stored yet, batch by batch."""
        context, stored = self._context, self._context.stored_groups()
        self._batch = first
        while True:
            done = stored.pop(self._batch, {})
            whole = context.first_batch() if context.curriculum.learns else None
            for index, task in enumerate(context.curriculum.batch(self._batch, whole=whole)):
                if index not in done:
                    yield GroupRequest(task=task, batch=self._batch, index=index)
            self._batch += 1

    def _begin(self, pool: WorkerPool, requests: Iterator[GroupRequest]) -> None:
        context = self._context
        while context.pacer.admits(context.units(self._under_way.values()), pool.version):
            request = next(requests)
            self._under_way[asyncio.create_task(self._one(pool, request))] = request

    async def _one(self, pool: WorkerPool, request: GroupRequest) -> list[Experience]:
        return await self._context.writer.add(await pool.run_group(request))

    async def _wait(self, following: asyncio.Task[None]) -> None:
        """Wait until a group is stored, or weights are updated."""
        context = self._context
        done, _ = await asyncio.wait(
            {*self._under_way, following, self._news},
            timeout=STOP_SECONDS,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if following in done:
            following.result()
        if self._news.done():  # a future can be set only once
            self._news = asyncio.get_running_loop().create_future()
        if finished := [task for task in self._under_way if task in done]:
            self._take(finished)
            context.pace()
            self._note()
        context.watch.check("train")
        # A rollout or an evaluation that takes long is not a reason to give up.
        if done or self._under_way or context.is_evaluating:
            self._idle_since = perf_counter()
        if perf_counter() - self._idle_since > context.config.schedule.timeout:
            raise StarvedError(
                f"gave up after {context.config.schedule.timeout:g} s: {self._described()}"
            )

    def _take(self, done: "Iterable[asyncio.Task[list[Experience]]]") -> None:
        for task in done:
            del self._under_way[task]
            self._finished.append(task.result())

    async def _end(self, pool: WorkerPool) -> None:
        """Cancel the groups under way, and store what they sampled."""
        stopped = self._context.stop.is_set()
        why = "the run was stopped" if stopped else "the run has all that it needs"
        for request in self._under_way.values():
            pool.stop(request, why)
        if self._under_way and not stopped:
            done, _ = await asyncio.wait(self._under_way, timeout=END_SECONDS)
            self._take(done)

    def _note(self, *, last: bool = False) -> None:
        """Store the metrics of each `batch_tasks` groups, and of the rest at the end."""
        context, size = self._context, self._context.batch_tasks
        while len(self._finished) >= size or (last and self._finished):
            groups, self._finished = self._finished[:size], self._finished[size:]
            rows = [row for group in groups for row in group]
            self._noted += 1
            context.note(self._noted, rows, perf_counter() - self._started)
            self._started = perf_counter()
            if not last:  # groups cancelled at the end are not failures of the workflow
                context.check(rows)

    async def _follow(self, pool: WorkerPool, ended: threading.Event) -> None:
        """Update the weights whenever newer ones are published, after evaluations that are due."""
        context = self._context
        while not ended.is_set():
            try:
                newer = await self._newer(pool.version, ended, seconds=FOLLOW_SECONDS)
            except StarvedError:
                # Whether the run is starved depends on its rollouts too, so `_wait` decides.
                continue
            await context.evaluate_until(newer.version)
            if await context.update(pool, newer) and not self._news.done():
                self._news.set_result(None)

    async def _newer(
        self, version: int, ended: threading.Event, *, seconds: float
    ) -> PublishedWeights:
        context = self._context

        def look() -> PublishedWeights | None:
            # `wait_for` ends quietly on `ended`; a stopped run must end with an error instead.
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
