"""Ends of groups, batches and runs: what is stopped ends soon, and ends nothing else."""

import asyncio
from pathlib import Path

import pytest
from support.builders import task
from support.rollouts import spec_of
from support.tiny_models import config, table

import rlake
from rlake.loop.inference.cancellation import CancelScope, cancel_scope
from rlake.loop.inference.policy import Policy
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.models.weights import Weights
from rlake.loop.rollouts.group import run_group
from rlake.loop.rollouts.workers import GroupRequest, WorkerPool
from rlake.loop.run import run
from rlake.store import Experience, Store, Task


async def never_ends(task: Task, policy: Policy) -> None:
    await asyncio.Event().wait()


def test_tries_that_wait_for_their_place_do_not_begin_when_their_group_is_stopped() -> None:
    async def stopped() -> list[Experience]:
        spec = spec_of(never_ends, group_size=3, rollout_timeout=60, slots=asyncio.Semaphore(1))
        stop = CancelScope()
        with cancel_scope(stop):
            work = run_group(task(1), ScriptedPolicy(["2"]), spec, batch=1, group_index=0)
            tries = asyncio.create_task(work)
        asyncio.get_running_loop().call_later(0.01, stop.set, "enough")
        return await asyncio.wait_for(tries, 30)

    rows = asyncio.run(stopped())
    assert [row.drop_reason for row in rows] == ["stopped: enough"] * 3


def test_an_asynchronous_run_is_done_whatever_is_under_way_at_its_end(store: Store) -> None:
    schedule = {"streaming": True, "max_ahead": 6, "max_lag": 8}
    waits = {"workflow": "support.runs:waits_after_batch_two"}
    run(store, config(explorer=waits, trainer={"steps": 2}, schedule=schedule))
    stopped = table(store, "experiences WHERE drop_reason LIKE 'stopped: the run has%'")
    assert stopped["batch"].n_unique() >= 3  # as many batches without a usable row end a job
    assert set(table(store, "runs WHERE ended_at IS NOT NULL")["status"]) == {"done"}


SAMPLED = {
    "explorer": {
        "workflow": "support.runs:waits_for_the_third",
        "oversampling": {"ratio": 0.1},  # of a batch of 4: one more
        "rollout_timeout": 100,  # of which it takes hardly anything
    },
    "trainer": {"steps": 1, "batch_size": 4},
}
SLOW = "experiences WHERE group_id LIKE '%/0002'"


@pytest.mark.slow
def test_the_slowest_are_stopped_when_as_many_are_stored_as_a_step_needs(
    store: Store, tmp_path: Path
) -> None:
    run(store, config(**SAMPLED))
    other = rlake.connect(tmp_path / "other")
    rows = store.sql("SELECT * FROM experiences WHERE group_id SIMILAR TO '.*/000[013]'").pl()
    other.append("experiences", [Experience.from_row(row) for row in rows.to_dicts()])
    run(other, config(**SAMPLED))  # as if it had been killed after these three
    for one in (store, other):
        reasons = set(table(one, SLOW)["drop_reason"])
        assert reasons == {"stopped: enough others of the batch were finished"}


@pytest.mark.slow
def test_a_batch_whose_rows_are_in_groups_of_their_own_is_not_made_again(store: Store) -> None:
    apart = {"workflow": "support.runs:apart"}
    run(store, config(explorer=apart, trainer={"steps": 2}))
    before = table(store, "experiences")["batch"].max()
    run(store, config(explorer=apart, trainer={"steps": 3}), resume=True)
    made = table(store, "metrics WHERE name = 'explore/rows' ORDER BY created_at")
    assert made["step"].to_list() == [*range(1, before + 1), before + 1]  # type: ignore[operator]


class Follows:
    """A runner whose weights take a while to come."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, -1
        self.may = asyncio.Event()

    async def update_weights(self, weights: Weights) -> None:
        await self.may.wait()
        self.version = weights.version

    async def sleep(self) -> None:
        raise AssertionError("nothing sleeps")

    async def run_group(self, request: GroupRequest) -> list[Experience]:
        raise AssertionError("nothing is tried")

    def stop(self, request: GroupRequest, reason: str) -> None:
        raise AssertionError("nothing is stopped")

    async def close(self) -> None:
        pass


def test_a_team_has_the_version_that_all_its_runners_sample_with() -> None:
    async def followed() -> list[int]:
        fast, slow = Follows("fast"), Follows("slow")
        team = WorkerPool([fast, slow])
        following = asyncio.create_task(team.update_weights(Weights(version=4, digest="four")))
        fast.may.set()
        while fast.version < 4:
            await asyncio.sleep(0)
        seen = [team.version]
        slow.may.set()
        await following
        return [*seen, team.version]

    assert asyncio.run(followed()) == [-1, 4]
