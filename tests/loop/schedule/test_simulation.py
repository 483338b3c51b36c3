"""The simulation of runs: its time adds up, and what is drawn obeys the schedule."""

from dataclasses import replace

import numpy as np
import pytest
from bench.events import Clock, Processor, Server
from bench.schedules import configured
from bench.simulated_run import Cluster, Cost, Costs, Outcome, SimulatedRun

LONG_TAIL = np.minimum(2.0, 0.05 * np.exp(np.random.default_rng(0).normal(size=4096)))
COSTS = Costs(
    environment=LONG_TAIL,
    sample=Cost(0.01, 0.004),
    handle=0.005,
    commit=Cost(0.02, 0.0015),
    pace=0.02,
    look=0.015,
    train=0.4,
    swap=0.005,
    wake=0.01,
    cores=1.5,
)


def outcome(schedule: str, costs: Costs = COSTS, cluster: Cluster | None = None) -> Outcome:
    return SimulatedRun(configured(schedule), costs, cluster or Cluster(64, 8), seed=0).run()


@pytest.mark.parametrize(("cores", "ends"), [(1.0, [3.0, 4.0]), (1.5, [2.0, 3.0]), (2.0, [1, 2])])
def test_jobs_share_the_cores_of_a_processor(cores: float, ends: list[float]) -> None:
    clock, ended = Clock(), []
    processor = Processor(clock, cores)
    for seconds in (1.0, 2.0, 1.0)[: 2 if cores == 2.0 else 3]:
        processor.work(seconds, lambda: ended.append(clock.now))
    clock.run(lambda: False)
    assert [ended[0], ended[-1]] == pytest.approx(ends)


def test_a_server_takes_what_waits_as_one_batch() -> None:
    clock, ended = Clock(), []
    server = Server(Processor(clock), Cost(1.0, 0.1))
    for at in (0.0, 0.0, 0.5, 0.6, 0.7):
        clock.after(at, lambda: server.add(lambda: ended.append(clock.now)))
    clock.run(lambda: False)
    assert ended == pytest.approx([1.2, 1.2, 2.5, 2.5, 2.5])
    assert server.busy == pytest.approx(2.5)


def test_an_on_policy_step_takes_the_sum_of_its_parts() -> None:
    costs = replace(COSTS, environment=np.full(4, 1.0))
    found = outcome("on_policy", costs, Cluster(explorers=32))
    commit, sample = costs.commit(32), costs.sample(32)
    rollouts = sample + 1.0 + costs.handle + commit
    step = rollouts + costs.look + costs.train + costs.wake + costs.swap
    # weights of version 0 are there from the start, and the last ones are not waited for
    taken = 100 * step - costs.swap - costs.wake
    assert 100 / found.steps_per_second == pytest.approx(taken)
    assert found.trainer_idle == pytest.approx(1 - 100 * costs.train / taken)
    assert found.writer_busy == pytest.approx(100 * commit / taken)


@pytest.mark.parametrize(("schedule", "most"), [("on_policy", 0), ("one_step_off", 1)])
def test_lags_are_those_of_the_schedule(schedule: str, most: int) -> None:
    found = outcome(schedule)
    assert found.lag_largest == most
    assert found.lag_mean <= most


def test_asynchronous_rows_are_never_older_than_allowed() -> None:
    fast = replace(COSTS, train=0.001)
    for costs in (COSTS, fast):
        assert outcome("asynchronous", costs).lag_largest <= 8


def test_a_seed_gives_one_outcome() -> None:
    assert outcome("asynchronous") == outcome("asynchronous")


def test_one_explorer_with_one_group_at_a_time_is_as_fast_as_its_groups() -> None:
    costs = replace(COSTS, environment=np.full(4, 1.0), train=0.01)
    found = outcome("asynchronous", costs, Cluster(explorers=1))
    group = costs.sample(1) + 1.0 + costs.handle
    assert found.rollouts_per_second == pytest.approx(8 / group, rel=0.02)
    assert found.explorer_idle == pytest.approx(0.0, abs=0.02)


def test_a_long_tail_costs_the_asynchronous_schedule_least() -> None:
    on_policy, one_off, streaming = (
        outcome(name).steps_per_second for name in ("on_policy", "one_step_off", "asynchronous")
    )
    assert on_policy < one_off < streaming
