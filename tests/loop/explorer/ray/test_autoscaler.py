"""The number of explorers follows the trainer, one at a time, within limits, by whole groups."""

import asyncio
import logging
from collections.abc import Iterator
from itertools import chain, repeat

import pytest
from support.tiny_models import config

from rlake.loop.config import RayConfig
from rlake.loop.explorer.ray.autoscaler import SAMPLES, Autoscaler
from rlake.loop.models.weights import Weights
from rlake.loop.rollouts.workers import GroupRequest, RolloutWorker, WorkerPool
from rlake.loop.runs.job import WorkerLostError
from rlake.store import Experience, Task
from rlake.store.errors import ConfigError, JobError, StoreError


class Worker:
    """A worker whose groups end when they may, or die then."""

    version = 0

    def __init__(self, name: str) -> None:
        self.name, self.may, self.tasks, self.is_closed = name, asyncio.Event(), list[str](), False
        self.dies = False

    async def update_weights(self, weights: Weights) -> None:
        self.version = weights.version

    async def sleep(self) -> None:
        raise AssertionError("nothing sleeps")

    async def run_group(self, request: GroupRequest) -> list[Experience]:
        assert not self.is_closed
        self.tasks.append(request.task.task_id)
        await self.may.wait()
        if self.dies:
            raise WorkerLostError(f"`{self.name}` died")
        return []

    def stop(self, request: GroupRequest, reason: str) -> None:
        raise AssertionError("nothing is stopped")

    async def close(self) -> None:
        self.is_closed = True


def group(index: int) -> GroupRequest:
    return GroupRequest(task=Task.ask(f"{index}+1=", str(index + 1)), batch=1, index=index)


async def counts(
    demands: Iterator[int], *, decisions: int, groups: int, room: int = 9
) -> list[int]:
    """Return how many explorers there are after each decision; there may be one to three."""
    cluster = config(ray={"max_explorers": 3, "scale_interval": 0.001}).ray
    assert cluster is not None
    pool = WorkerPool(made := [Worker("first")])

    async def demand() -> int:
        return next(demands)

    async def grow() -> None:
        if len(made) == room:
            raise JobError("no room")
        made.append(Worker(f"more-{len(made)}"))
        await pool.add(made[-1])

    async def shrink() -> None:
        await pool.remove(made[1:])

    working = [asyncio.create_task(pool.run_group(group(i))) for i in range(groups)]
    made[0].may.set() if groups == 0 else None
    scaler = Autoscaler(cluster, pool=pool, grow=grow, shrink=shrink, demand=demand)
    found = []
    for _ in range(decisions):
        await scaler.decide()
        found.append(len(pool))
    told = scaler.metrics()
    assert told["explore/explorers"] == found[-1]
    assert told["explore/scale/change"] == found[-1] - 1
    for task in working:
        task.cancel()
    return found


def test_explorers_are_added_while_the_trainer_waits_and_ended_while_they_wait():
    demands = chain(repeat(1, 3 * SAMPLES), repeat(-1))
    found = asyncio.run(counts(demands, decisions=6, groups=9))
    assert found == [2, 3, 3, 2, 1, 1]


@pytest.mark.parametrize(
    ("demands", "groups"),
    [([1, -1], 9), ([1, 0], 9), ([0], 9), ([1], 1), ([1], 0)],
    ids=["both wait in turns", "half the time", "neither waits", "one group", "no group"],
)
def test_nothing_changes_where_another_explorer_would_not_help(demands: list[int], groups: int):
    asked = chain.from_iterable(repeat(demands))
    assert asyncio.run(counts(asked, decisions=3, groups=groups)) == [1, 1, 1]


def test_a_run_goes_on_where_there_is_no_room_for_more(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        found = asyncio.run(counts(repeat(1), decisions=3, groups=9, room=2))
    assert found == [2, 2, 2]
    assert "no further explorer was started: no room" in caplog.text


def cluster_of_two() -> RayConfig:
    cluster = config(ray={"max_explorers": 2, "scale_interval": 0.001}).ray
    assert cluster is not None
    return cluster


async def waits() -> int:
    return 1


async def nothing() -> None:
    raise AssertionError("no explorer is started or ended")


def test_an_explorer_that_is_restarted_counts_among_the_most_that_there_may_be():
    async def went() -> None:
        async def restore(lost: RolloutWorker) -> Worker:
            await asyncio.Event().wait()
            raise AssertionError("it is never there again")

        lost, left = Worker("lost"), Worker("left")
        pool = WorkerPool([lost, left], restore=restore)
        working = [asyncio.create_task(pool.run_group(group(i))) for i in range(9)]
        await asyncio.sleep(0)
        lost.dies = True
        lost.may.set()
        scaler = Autoscaler(cluster_of_two(), pool=pool, grow=nothing, shrink=nothing, demand=waits)
        await scaler.decide()
        assert (len(pool), pool.restoring) == (1, 1)
        for task in working:
            task.cancel()
        await pool.close()

    asyncio.run(asyncio.wait_for(went(), 10))


def test_a_demand_that_cannot_be_read_for_a_while_is_read_later(caplog: pytest.LogCaptureFixture):
    async def went() -> None:
        grown, asked = asyncio.Event(), 0

        async def demand() -> int:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise StoreError("the store does not answer")
            return 1

        async def grow() -> None:
            grown.set()

        pool = WorkerPool([Worker("first")])
        working = [asyncio.create_task(pool.run_group(group(i))) for i in range(2)]
        scaler = Autoscaler(cluster_of_two(), pool=pool, grow=grow, shrink=nothing, demand=demand)
        following = asyncio.create_task(scaler.run())
        await grown.wait()
        for task in (following, *working):
            task.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(went(), 10))
    assert "stays as it is for now: the store does not answer" in caplog.text


def test_an_explorer_that_leaves_ends_its_groups_and_gets_no_others():
    async def went() -> None:
        stays, leaves = Worker("stays"), Worker("leaves")
        pool = WorkerPool([leaves, stays])
        working = [asyncio.create_task(pool.run_group(group(i))) for i in range(2)]
        await asyncio.sleep(0)
        leaving = asyncio.create_task(pool.remove([leaves]))
        await asyncio.sleep(0)
        working.append(asyncio.create_task(pool.run_group(group(2))))
        await pool.update_weights(Weights(version=1, digest="one"))
        assert (leaves.version, leaves.is_closed, len(leaves.tasks)) == (1, False, 1)
        leaves.may.set()
        assert await leaving is leaves
        assert (leaves.is_closed, len(stays.tasks), len(pool)) == (True, 2, 1)
        stays.may.set()
        await asyncio.gather(*working)

    asyncio.run(asyncio.wait_for(went(), 10))


def test_fewer_explorers_at_most_than_at_least_are_refused():
    with pytest.raises(ConfigError, match="max_explorers 1 is less than num_explorers 2"):
        config(ray={"num_explorers": 2, "max_explorers": 1})
