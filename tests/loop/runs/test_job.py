"""Who may start a job of a run, and what `runs` says of how it went."""

from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.tiny_models import config, table

from rlake.loop.config import RunConfig, build
from rlake.loop.runs.job import (
    Job,
    OtherJobError,
    Watch,
    job,
    record_interrupted,
    recorded,
    run_folder,
)
from rlake.store import Experience, Store
from rlake.store.errors import ConfigError, JobError


def start(store: Store, settings: RunConfig, name: str = "train", *, resume: bool = False) -> int:
    """Run a job that does nothing, and return which attempt it was."""
    with job(store, settings, name, resume=resume) as mine, recorded(mine, start_step=1):
        return mine.attempt


def statuses(store: Store) -> list[tuple[str, int, str]]:
    query = "SELECT job, attempt, status FROM runs ORDER BY ALL"
    return store.sql(query).fetchall()


def test_a_placed_job_that_was_killed_without_a_word_is_recorded_as_interrupted(
    store: Store,
) -> None:
    start(store, config())
    first = table(store, "job_events").drop("created_at").row(0, named=True)
    store.append("job_events", [first | {"attempt": 2, "status": "running"}])
    record_interrupted(store, "demo", "train", after=2)  # an attempt of an earlier process
    assert ("train", 2, "running") in statuses(store)
    for _ in range(2):
        record_interrupted(store, "demo", "train", after=1)
        assert ("train", 2, "interrupted") in statuses(store)
    assert store.count("job_events") == 4, "once"
    start(store, config(), resume=True)
    record_interrupted(store, "demo", "train", after=0)
    assert ("train", 3, "done") in statuses(store)


def changed(**changes: Any) -> RunConfig:
    return config(**changes)


def test_a_run_that_was_started_goes_on_only_when_told_to(store: Store) -> None:
    assert start(store, config()) == 1
    with pytest.raises(
        ConfigError, match=r"run `demo` was started before .*train.* is done.*--resume"
    ):
        start(store, config())
    assert start(store, config(), resume=True) == 2
    assert start(store, config(), resume=True) == 3


def failed(store: Store, settings: RunConfig) -> None:
    with (
        pytest.raises(RuntimeError, match="no database"),
        job(store, settings, "train", resume=False) as mine,
        recorded(mine, start_step=1),
    ):
        raise RuntimeError("no database")


def test_a_run_that_failed_before_it_stored_anything_starts_anew(store: Store) -> None:
    failed(store, config())
    failed(store, changed(seed=5))
    assert start(store, config()) == 3
    with pytest.raises(ConfigError, match="started before"):
        start(store, config())


def test_a_run_that_failed_with_rows_goes_on_only_when_told_to(store: Store) -> None:
    failed(store, config())
    store.append(
        "experiences", [Experience(experience_id="e", group_id="g", task_id="t", run_id="demo")]
    )
    with pytest.raises(ConfigError, match=r"started before .*failed"):
        start(store, config())


def test_resuming_a_run_that_was_never_started_starts_it(store: Store) -> None:
    assert start(store, config(), resume=True) == 1


def test_each_job_counts_its_own_attempts(store: Store) -> None:
    assert start(store, config(), "train") == 1
    assert start(store, config(), "explore") == 1
    assert start(store, config(), "train", resume=True) == 2
    assert start(store, config(), "evaluate") == 1
    assert start(store, config(), "evaluate") == 2


def test_another_name_is_another_run(store: Store) -> None:
    start(store, config())
    assert start(store, config(name="other")) == 1


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"algorithm": {"grpo": {"group_size": 4}}}, "algorithm.grpo.group_size"),
        ({"trainer": {"learning_rate": 0.5}}, "trainer.learning_rate"),
        ({"model": {"from_scratch": {"layers": 2}}}, "model.from_scratch"),
        ({"schedule": {"max_ahead": 1}}, "schedule.max_ahead"),
        ({"explorer": {"sampling": {"temperature": 0.5}}}, "explorer.sampling.temperature"),
        ({"tasks": {"where": "true"}}, "tasks.where"),
    ],
)
def test_a_run_is_not_continued_as_another(store: Store, changes: dict[str, Any], key: str) -> None:
    start(store, config())
    with pytest.raises(ConfigError, match=rf"run `demo` was started with another `{key}") as caught:
        start(store, config(**changes), resume=True)
    assert "--set name=" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"steps": 50}},
        {"trainer": {"keep_checkpoints": 9}},
        {"schedule": {"timeout": 1}},
        {"schedule": {"max_lag": 0}},  # what it was, said aloud
        {"evaluate": {"group_size": 3}},
        {"store": "elsewhere"},
        {"trackers": ["support.trackers:Notes"]},
    ],
)
def test_a_longer_run_or_other_waits_are_the_same_run(
    store: Store, changes: dict[str, Any]
) -> None:
    start(store, config())
    assert start(store, config(**changes), resume=True) == 2


def test_measuring_a_model_with_other_settings_does_not_bind_the_run(store: Store) -> None:
    start(store, config(trainer={"learning_rate": 0.5}), "evaluate")
    assert start(store, config()) == 1
    start(store, config(trainer={"learning_rate": 0.5}), "evaluate")
    assert start(store, config(), resume=True) == 2


def test_the_configuration_is_stored_resolved_and_is_the_run(store: Store) -> None:
    settings = config(schedule={"max_ahead": 2, "publish_every": 3})
    start(store, settings)
    [text] = table(store, "job_events", "DISTINCT config")["config"].to_list()
    stored = RunConfig.model_validate_json(text)
    assert stored.schedule.max_lag == settings.schedule.lag == 4
    assert stored.trainer == settings.trainer
    assert build(stored.model_dump(mode="json")) == stored


def test_how_a_job_went_is_on_record(store: Store) -> None:
    with job(store, config(), "train", resume=False) as mine, recorded(mine, start_step=4):
        [row] = table(store, "runs").to_dicts()
        assert (row["status"], row["ended_at"], row["start_step"]) == ("running", None, 4)
    [row] = table(store, "runs").to_dicts()
    assert (row["status"], row["error"], row["job"]) == ("done", None, "train")
    assert row["ended_at"] >= row["started_at"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (JobError("no rows"), "failed", "no rows"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (ValueError("x" * 5000), "failed", "x" * 2000),
    ],
)
def test_a_failed_job_is_on_record_with_its_error(
    store: Store, error: BaseException, status: str, said: str
) -> None:
    with (
        pytest.raises(type(error)),
        job(store, config(), "train", resume=False) as mine,
        recorded(mine, start_step=1),
    ):
        raise error
    [row] = table(store, "runs").to_dicts()
    assert (row["status"], row["error"]) == (status, said)
    assert start(store, config(), resume=True) == 2


HOLDING = """
import sys
import rlake
from support.tiny_models import config
from rlake.loop.runs.job import job
with job(rlake.connect(sys.argv[1]), config(), "train", resume=False):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_job_that_runs_in_another_process_is_not_started_twice(store: Store) -> None:
    other = processes.start(HOLDING, store.uri)
    try:
        assert processes.said(other) == "held"
        with pytest.raises(JobError, match="`train` of run `demo` is running in another process"):
            start(store, config(), resume=True)
        assert start(store, config(), "explore") == 1
    finally:
        other.kill()
        other.communicate()
    assert start(store, config(), resume=True) == 1  # a killed process holds nothing


def test_a_job_that_runs_in_this_process_is_not_started_twice(store: Store) -> None:
    with (
        job(store, config(), "train", resume=False),
        pytest.raises(JobError, match="is running in another process"),
    ):
        start(store, config(), resume=True)


def test_checkpoints_of_a_run_that_the_store_does_not_know_are_refused_and_kept(
    store: Store,
) -> None:
    left = run_folder(store, config()) / "checkpoints" / "step-000001"
    left.mkdir(parents=True)
    with pytest.raises(ConfigError, match="run `demo` that this store does not know"):
        start(store, config())
    assert left.is_dir()


def test_checkpoints_of_a_known_run_stay(store: Store) -> None:
    start(store, config())
    kept = run_folder(store, config()) / "checkpoints" / "step-000001"
    kept.mkdir(parents=True)
    start(store, config(), resume=True)
    assert kept.is_dir()


def test_runs_lie_in_the_store_or_where_the_configuration_says(
    store: Store, tmp_path: Path
) -> None:
    assert store.folder is not None
    assert run_folder(store, config()) == store.folder / "runs" / "demo"
    assert run_folder(store, config(output=str(tmp_path))) == tmp_path / "demo"
    with pytest.raises(ConfigError, match="`output` is required"):
        run_folder(Store("s3://bucket/lake"), config())


def attempt(store: Store, name: str, number: int) -> Job:
    return Job(store, config(), name, number, Path(store.uri))


def fails(mine: Job, text: str) -> None:
    with pytest.raises(JobError), recorded(mine, start_step=1):
        raise JobError(text)


def test_a_watch_tells_when_the_other_job_failed(store: Store) -> None:
    watch = Watch(attempt(store, "explore", 1))
    watch.check("train")
    trainer = attempt(store, "train", 1)
    with recorded(trainer, start_step=1):
        watch.check("train")
    watch.check("train")
    fails(attempt(store, "train", 2), "loss is not finite")
    with pytest.raises(OtherJobError, match="`train` of run `demo` failed: loss is not finite"):
        watch.check("train")
    with recorded(attempt(store, "train", 3), start_step=1):
        watch.check("train")


def test_a_watch_minds_no_failure_from_before_its_own_job(store: Store) -> None:
    fails(attempt(store, "train", 1), "killed")
    Watch(attempt(store, "explore", 2)).check("train")


def test_a_watch_minds_a_failure_of_the_same_attempt_from_before_its_own_job(store: Store) -> None:
    fails(attempt(store, "explore", 1), "no task matches")
    with pytest.raises(JobError, match="`explore` of run `demo` failed: no task matches"):
        Watch(attempt(store, "train", 1)).check("explore")


FAILING = """
import sys
import rlake
from rlake.loop.runs.job import job, recorded
from rlake.loop.config import RunConfig
how = RunConfig.model_validate_json(sys.argv[2])
try:
    with job(rlake.connect(sys.argv[1]), how, "train", resume=True) as mine:
        with recorded(mine, start_step=1):
            print("running", flush=True)
            sys.stdin.readline()
            raise RuntimeError("out of memory")
finally:
    print("failed", flush=True)
    sys.stdin.readline()  # the test kills it: Python's end can hang under faketime
"""
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


@pytest.mark.slow
@pytest.mark.skipif(FAKETIME is None, reason="needs Debian's package libfaketime")
@pytest.mark.parametrize("shift", ["-2h", "+2h"])
def test_failures_are_told_apart_by_their_order_and_not_by_clocks_that_differ(
    store: Store, monkeypatch: pytest.MonkeyPatch, shift: str
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(FAKETIME))
    monkeypatch.setenv("FAKETIME", shift)
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    monkeypatch.setenv("NO_FAKE_STAT", "1")
    trainer = processes.start(FAILING, store.uri, config().model_dump_json())
    monkeypatch.undo()
    assert processes.said(trainer) == "running"
    start(store, config(), "explore")
    start(store, config(), "explore", resume=True)
    with job(store, config(), "explore", resume=True) as mine:
        watch = Watch(mine)
        watch.check("train")
        processes.tell(trainer)
        assert processes.said(trainer) == "failed"
        trainer.kill()
        trainer.communicate()
        with pytest.raises(OtherJobError, match="`train` of run `demo` failed: out of memory"):
            watch.check("train")
    [(began,)] = store.sql("SELECT max(started_at) FROM runs WHERE job = 'train'").fetchall()
    assert abs((began - mine.started_at).total_seconds()) > 3600, "its clock is shifted"
    with job(store, config(), "explore", resume=True) as mine:
        Watch(mine).check("train")  # that failure was before this attempt
