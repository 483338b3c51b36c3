"""Exploring without batches: what is begun, how old it is when drawn, what slow tries become."""

import asyncio
import threading
from collections import Counter
from typing import Any

import polars as pl
import pytest
from support.builders import line_of, task
from support.rollouts import rollouts
from support.tiny_models import config, table

from rlake.loop.config import RunConfig, ScheduleConfig
from rlake.loop.inference.policy import Completion, Policy
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.rollouts.timeouts import RolloutTimer
from rlake.loop.run import explore, run, train
from rlake.loop.schedule.pacing import Pacer
from rlake.loop.workflows import single_turn
from rlake.store import Experience, Store, Task
from rlake.store.errors import ConfigError, JobError

UNFINISHED = """
    SELECT s.batch, s.position FROM task_selections s WHERE NOT EXISTS (
        SELECT 1 FROM experiences e
        WHERE e.group_id = format('{}/{:06d}/{:04d}', s.run_id, s.batch, s.position))
"""
"""Tasks that were chosen and of which no try is stored."""


def streamed(store: Store, **changes: Any) -> pl.DataFrame:
    """Run asynchronously; return what was drawn, in order, with the rows' own columns."""
    schedule = {"preset": "asynchronous", "timeout": 60, **changes.pop("schedule", {})}
    run(store, config(schedule=schedule, **changes))
    return table(
        store,
        "draws_current d JOIN experiences e USING (experience_id) ORDER BY d.step, position",
        "d.*, e.policy_version, e.segments, e.digests, e.group_id, e.num_tokens, e.prompt_length",
    )


def test_an_asynchronous_run_draws_each_row_once_and_every_segment_names_published_weights(
    store: Store,
) -> None:
    long = {"sampling": {"max_tokens": 12}}
    schedule = {"max_ahead": 2, "max_lag": 3}
    rows = streamed(store, trainer={"steps": 8}, schedule=schedule, explorer=long)
    assert rows.group_by("step").len()["len"].to_list() == [6] * 8  # two groups of three
    assert set(Counter(rows["experience_id"]).values()) == {1}
    assert rows["lag"].to_list() == (rows["step"] - 1 - rows["policy_version"]).to_list()
    assert 0 < rows["lag"].max() <= 3  # type: ignore[operator]
    digests = dict(store.sql("SELECT policy_version, digest FROM policies_current").fetchall())
    for row in rows.to_dicts():
        sampled = sum(s["num_tokens"] for s in row["segments"])
        assert sampled == row["num_tokens"] - row["prompt_length"]
        versions = [s["policy_version"] for s in row["segments"]]
        assert versions == sorted(versions)
        assert row["policy_version"] == versions[0]
        assert row["digests"] == [digests[v] for v in versions]


@pytest.mark.slow
def test_groups_that_fail_make_room_for_others(store: Store) -> None:
    fails = {"workflow": "support.runs:fails_on_even"}
    rows = streamed(store, explorer=fails, trainer={"steps": 5})
    assert rows["step"].n_unique() == 5
    assert table(store, "experiences WHERE drop_reason LIKE '%no even sums today%'").height > 0


def test_a_run_whose_tries_all_fail_ends_and_says_why(store: Store) -> None:
    with pytest.raises(JobError, match=r"3 batches in a row gave no usable row.*no sandbox"):
        streamed(store, explorer={"workflow": "support.runs:fails"})


@pytest.mark.slow
def test_no_task_is_skipped_but_those_of_the_batch_in_which_the_run_ended(store: Store) -> None:
    streamed(store, trainer={"steps": 6})
    batches = {batch for batch, _ in store.sql(UNFINISHED).fetchall()}
    [(last,)] = store.sql("SELECT max(batch) FROM task_selections").fetchall()
    assert batches <= {last}


def test_a_run_that_is_stopped_says_so(store: Store) -> None:
    stop = threading.Event()

    def listener(job: str, step: int, values: object) -> None:
        if job == "explore" and step == 2:
            stop.set()

    settings = config(schedule={"preset": "asynchronous", "timeout": 60}, trainer={"steps": 100})
    ended = threading.Event()
    trainer = threading.Thread(target=trains_until, args=(store, settings, ended))
    trainer.start()
    try:
        with pytest.raises(JobError, match="the run was stopped"):
            explore(store, settings, stop=stop, listener=listener)
    finally:
        ended.set()
        trainer.join(100)


def trains_until(store: Store, settings: RunConfig, ended: threading.Event) -> None:
    try:
        train(store, settings, stop=ended)
    except JobError:
        if not ended.is_set():
            raise


@pytest.mark.parametrize(
    ("ahead", "newest", "under_way", "admitted"),
    [(0, 0, 0, True), (0, 0, 3, True), (0, 0, 4, False), (1, 0, 7, True), (1, 0, 8, False)],
)
def test_a_group_is_begun_when_its_step_is_near_enough(
    ahead: int, newest: int, under_way: int, *, admitted: bool
) -> None:
    pacer = Pacer(ScheduleConfig(max_ahead=ahead), new_units=lambda _: 4)
    assert pacer.admits(under_way, newest) is admitted


def test_groups_that_are_stored_count_as_those_under_way_do() -> None:
    pacer = Pacer(ScheduleConfig(), new_units=lambda _: 4)
    pacer.stored([0, 0, 0])
    assert pacer.admits(0, 0)
    assert not pacer.admits(1, 0)
    pacer.stored([0])
    assert not pacer.admits(0, 0)  # it would be for step 2, which needs version 1
    assert pacer.admits(0, 1)


def test_presets_are_names_for_schedules_and_parts_of_them_can_be_changed() -> None:
    made = ScheduleConfig.model_validate({"preset": "asynchronous", "max_lag": 5})
    assert (made.streaming, made.max_lag) == (True, 5)
    assert ScheduleConfig.model_validate("on_policy").lag == 0
    assert ScheduleConfig.model_validate("one_step_off").lag == 1
    with pytest.raises(ConfigError, match=r"schedule `asynchronus` does not exist.*asynchronous"):
        config(schedule="asynchronus")


def slow_above(limit: int) -> Any:
    """Return a workflow that never ends for tasks with an answer above `limit`."""

    async def workflow(task: Task, policy: Policy) -> Experience:
        row = await single_turn(task, policy)
        if int(task.answer or 0) > limit:
            await asyncio.Event().wait()
        return row

    return workflow


def tries(workflow: Any, *tasks: Task, **how: Any) -> list[Experience]:
    return rollouts(ScriptedPolicy(["12"], version=3), workflow, *tasks, **how)


def test_a_try_that_takes_too_long_keeps_what_was_sampled() -> None:
    quick, slow = tries(slow_above(3), task(1), task(2), rollout_timeout=0.5)
    assert quick.finish_reason == "stop"
    assert slow.finish_reason == "timeout"
    assert slow.drop_reason == "workflow failed: it took longer than 0.5 s"
    assert list(slow.token_ids or ())[-3:] == [49, 50, 0] == list(quick.token_ids or ())[-3:]
    assert slow.reward is None


def test_a_try_that_fails_is_made_again_so_often_and_with_other_answers() -> None:
    seen: list[Completion] = []

    async def fails_twice(task: Task, policy: Policy) -> Experience:
        seen.extend(await policy.generate(task.messages))
        if len(seen) < 3:
            raise OSError("no sandbox")
        return await single_turn(task, policy)

    [row] = tries(fails_twice, task(1), retries=2)
    assert row.drop_reason is None
    assert row.metrics["retries"] == 2.0
    seen.clear()
    [row] = tries(fails_twice, task(1), retries=1)
    where = line_of(__file__, 'OSError("no')
    assert row.drop_reason == f"workflow failed: OSError: no sandbox {where}"


def test_a_limit_follows_how_long_tries_take_once_there_are_enough() -> None:
    clock = RolloutTimer(multiplier=3.0, min_samples=2)
    assert clock.limit(10.0) == 10.0
    clock.note(0.1)
    assert clock.limit(10.0) == 10.0
    clock.note(0.3)
    assert clock.limit(10.0) == pytest.approx(0.6)
    assert clock.limit(0.5) == 0.5
    assert RolloutTimer().limit(None) is None


def test_of_more_groups_than_a_batch_needs_the_slowest_are_stopped(store: Store) -> None:
    slow = {"workflow": "support.runs:waits_for_the_third", "oversampling": {"ratio": 0.5}}
    run(store, config(explorer=slow, trainer={"steps": 3}))
    [(stopped, tokens)] = store.sql(
        "SELECT count(*), min(num_tokens) FROM experiences "
        "WHERE drop_reason LIKE 'stopped: enough%'"
    ).fetchall()
    assert stopped == 3 * 3  # one group of three in each batch
    assert tokens > 0
    drawn = store.sql("SELECT count(*) FROM draws_current").fetchall()
    assert drawn[0][0] == 3 * 6
