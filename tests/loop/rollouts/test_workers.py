"""A pool of workers of which some die: the others go on, with the weights that they have."""

import asyncio
import logging

import pytest

from rlake.loop.models.weights import Weights
from rlake.loop.rollouts.workers import GroupRequest, RolloutWorker, WorkerPool
from rlake.loop.runs.job import WorkerLostError
from rlake.loop.weight_sync import WeightsLostError
from rlake.store import Experience, Task
from rlake.store.errors import JobError

NEW = Weights(version=4, digest="four")
REQUEST = GroupRequest(task=Task.ask("1+1=", "2"), batch=1, index=0)


class Worker:
    """A worker that dies in its next call, or lives; it cannot receive the version `lost`."""

    def __init__(self, name: str, *, dies: bool = False, lost: int | None = None) -> None:
        self.name, self.version, self.dies, self.lost = name, -1, dies, lost
        self.is_closed = False

    def _live(self) -> None:
        if self.dies:
            raise WorkerLostError(f"`{self.name}` died: its node was lost")

    async def update_weights(self, weights: Weights) -> None:
        self._live()
        if weights.version == self.lost:
            raise WeightsLostError(f"version {self.lost} did not come")
        self.version = weights.version

    async def sleep(self) -> None:
        self._live()

    async def run_group(self, request: GroupRequest) -> list[Experience]:
        self._live()
        return [Experience(task_id=self.name, group_id="g", experience_id="e")]

    def stop(self, request: GroupRequest, reason: str) -> None:
        raise AssertionError("nothing is stopped")

    async def close(self) -> None:
        self.is_closed = True


def test_the_others_go_on_while_one_that_died_in_an_update_is_restarted() -> None:
    room, asked = asyncio.Event(), list[str]()

    async def restore(lost: RolloutWorker) -> Worker:
        asked.append(lost.name)
        await room.wait()
        return Worker("again")

    async def went() -> list[object]:
        pool = WorkerPool([Worker("lost", dies=True), Worker("left")], restore=restore)
        await pool.update_weights(NEW)
        [row] = await pool.run_group(REQUEST)
        seen: list[object] = [len(pool), pool.version, row.task_id]
        room.set()
        while len(pool) < 2:
            await asyncio.sleep(0)
        return [*seen, pool.version]

    assert asyncio.run(asyncio.wait_for(went(), 10)) == [1, 4, "left", 4]
    assert asked == ["lost"]


def test_a_run_goes_on_with_fewer_explorers_and_ends_when_none_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def restore(lost: RolloutWorker) -> Worker:
        raise JobError("no room for it")

    async def went() -> None:
        left = Worker("left")
        pool = WorkerPool([Worker("lost", dies=True), left], restore=restore)
        [row] = await pool.run_group(REQUEST)
        assert row.task_id == "left"
        while not caplog.text:
            await asyncio.sleep(0)
        left.dies = True
        with pytest.raises(JobError, match="no room for it"):
            await pool.run_group(REQUEST)

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(went(), 10))
    told = "`lost` is not restarted; the run has 1 of its explorers left: no room for it"
    assert told in caplog.text


def test_an_explorer_that_is_restarted_while_the_weights_are_lost_waits_for_others() -> None:
    async def went() -> None:
        lost, again, told = Worker("lost"), Worker("again", lost=4), list[Weights]()

        async def restore(dead: RolloutWorker) -> Worker:
            return again

        pool = WorkerPool([lost], restore=restore)
        pool.when_lost = told.append
        await pool.update_weights(NEW)
        lost.dies = True
        working = asyncio.create_task(pool.run_group(REQUEST))
        while not told:
            await asyncio.sleep(0)
        assert (told, pool.version, pool.restoring) == ([NEW], -1, 1), "any version is newer"
        await pool.update_weights(Weights(version=3, digest="three"))
        [row] = await working
        assert (row.task_id, pool.version, pool.restoring) == ("again", 3, 0)

    asyncio.run(asyncio.wait_for(went(), 10))


def test_an_explorer_for_which_no_weights_come_in_time_is_ended() -> None:
    async def went() -> None:
        lost, again = Worker("lost"), Worker("again", lost=4)

        async def restore(dead: RolloutWorker) -> Worker:
            return again

        pool = WorkerPool([lost], restore=restore, patience=0.01)
        await pool.update_weights(NEW)
        lost.dies = True
        with pytest.raises(WeightsLostError, match="version 4 did not come"):
            await pool.run_group(REQUEST)
        assert again.is_closed

    asyncio.run(asyncio.wait_for(went(), 10))
