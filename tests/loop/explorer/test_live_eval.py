"""Measuring a policy while its run goes on: which versions, with which weights, and who notices."""

import shutil
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support import runs as loop_parts
from support.jobs import told
from support.tiny_models import SUMS, config, offline, table

import rlake
from rlake.loop.config import RunConfig
from rlake.loop.evaluation.evaluate import evaluate_checkpoints
from rlake.loop.run import run
from rlake.loop.trainer.checkpoints import Checkpoints
from rlake.store import Store, Task
from rlake.store.errors import ConfigError

MEASURED = """
    experiences e JOIN tasks t USING (task_id) WHERE e.purpose = 'eval' ORDER BY ALL
"""
MADE = "experiences WHERE run_id = 'demo' ORDER BY experience_id"


def measuring(every: int | None = 2, **changes: Any) -> RunConfig:
    """A run of four steps that is measured greedily on five tasks while it goes on."""
    settings = {"sampling": {"temperature": 0, "max_tokens": 3}, "every_steps": every}
    trainer = {"steps": 4, **changes.pop("trainer", {})}
    return config(evaluate=settings | changes.pop("evaluate", {}), trainer=trainer, **changes)


def measured(store: Store) -> dict[int, int]:
    """How many rows each measured version has; all that the rows say must be of that version."""
    rows = table(store, MEASURED, "e.run_id, e.batch, policy_version, segments, digests, t.split")
    published = dict(store.sql("SELECT policy_version, digest FROM policies_current").fetchall())
    counts: dict[int, int] = {}
    for row in rows.to_dicts():
        version = row["batch"]
        assert row["run_id"].startswith(f"demo:eval-{version:06d}-")
        assert row["policy_version"] == version
        assert [s["policy_version"] for s in row["segments"]] == [version]
        assert set(row["digests"]) <= {published[version], None}
        assert row["split"] == "eval"
        counts[version] = counts.get(version, 0) + 1
    return counts


def numbers(store: Store, name: str) -> dict[int, float]:
    where = f"metrics WHERE job = 'evaluate' AND name = '{name}' ORDER BY step"
    return dict(table(store, where, "step, value").rows())


@pytest.mark.parametrize(
    "schedule", [{"max_ahead": 0}, {"max_ahead": 2, "weight_transport": "memory"}], ids=str
)
def test_a_run_that_is_measured_trains_on_the_same_rows_bit_for_bit(
    store: Store, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    alone, two = rlake.connect(tmp_path / "alone"), {"steps": 2}
    run(alone, measuring(every=None, schedule=schedule, trainer=two))
    run(store, measuring(every=1, schedule=schedule, trainer=two))
    assert told(store) == told(alone)
    rows = [table(one, MADE).drop("created_at", "timings", "digest") for one in (alone, store)]
    assert rows[0].equals(rows[1])
    assert measured(store) == dict.fromkeys(range(3), 5)
    assert measured(alone) == {}


@pytest.mark.parametrize("stream", [False, True], ids=["batches", "stream"])
def test_every_second_version_is_measured_and_the_first_and_the_last(
    store: Store, *, stream: bool
) -> None:
    schedule = {"preset": "asynchronous"} if stream else {}
    heard: list[tuple[int, float]] = []

    def listener(job: str, step: int, values: Any) -> None:
        if job == "evaluate":
            heard.append((step, values["eval/reward_mean"]))

    settings = measuring(trainer={"steps": 3}, schedule=schedule)
    run(store, settings, listener=listener)
    assert measured(store) == {0: 5, 2: 5, 3: 5}
    assert heard == list(numbers(store, "eval/reward_mean").items())
    rewards = table(store, MEASURED, "e.batch, e.reward").group_by("batch").mean().sort("batch")
    assert heard == [(step, pytest.approx(mean)) for step, mean in rewards.rows()]
    drawn = table(store, "draws_current JOIN experiences e USING (experience_id)", "e.run_id")
    assert set(drawn["run_id"]) == {"demo"}


def test_the_start_may_be_left_out_and_what_is_published_seldom_is_measured_when_it_is(
    store: Store,
) -> None:
    schedule = {"max_ahead": 2, "publish_every": 2}
    settings = measuring(2, trainer={"steps": 3}, schedule=schedule, evaluate={"at_start": False})
    run(store, settings)
    assert measured(store) == {2: 5, 3: 5}


def test_weights_stay_until_they_are_measured_however_far_the_trainer_is(store: Store) -> None:
    ended = threading.Event()

    def listener(job: str, step: int, values: object) -> None:
        if job == "train" and step == 6:
            ended.set()
        if job == "evaluate" and step == 1:
            assert ended.wait(60), "nothing keeps the trainer from its last step"

    settings = measuring(
        every=1,
        explorer={"tasks_per_batch": 12},  # six steps take it up, and weights are held for one
        schedule={"weight_transport": "memory", "max_lag": 9},
        trainer={"steps": 6, "keep_checkpoints": 1, "checkpoint_every": 1},
    )
    run(store, settings, listener=listener)
    assert measured(store) == dict.fromkeys(range(7), 5)
    assert store.runs_folder is not None
    left = sorted(path.name for path in (store.runs_folder / "demo" / "policies").iterdir())
    assert len(left) < 7, "what is measured need not stay"


def test_a_stream_replaces_no_weights_while_they_are_measured_and_goes_on_exploring(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_parts, "LATER", ("eval-000001", threading.Event()))

    def listener(job: str, step: int, values: object) -> None:
        if job == "train" and step == 3:
            loop_parts.LATER[1].set()

    explorer = {"workflow": "support.runs:asks_again_later"}
    settings = measuring(every=1, explorer=explorer, schedule={"preset": "asynchronous"})
    run(store, settings, listener=listener)
    assert loop_parts.LATER[1].is_set()
    assert measured(store) == dict.fromkeys(range(5), 10)


def test_tasksets_are_measured_by_themselves_each_in_its_own_way(store: Store) -> None:
    more = [Task.ask(f"{i}+0=", str(i), taskset="zeros", split="eval") for i in range(3)]
    store.append("tasks", [*more, Task.ask("1+0=", "1", taskset="others", split="eval")])
    often = {"group_size": 4, "sampling": {"temperature": 1.0, "max_tokens": 2}}
    settings = measuring(
        4,
        tasks=SUMS,
        explorer={"rewards": "support.runs:small"},
        evaluate={"tasksets": {"addition": {}, "zeros": often}},
    )
    run(store, settings)
    counts = table(store, MEASURED, "e.batch, t.taskset").group_by("taskset").len().sort("taskset")
    assert counts.rows() == [("addition", 10), ("zeros", 24)]
    told_of = table(store, "metrics WHERE job = 'evaluate' AND step = 4", "name, value")
    values = dict(told_of.rows())
    assert settings.evaluate is not None
    assert {*settings.evaluate.metrics, "eval/unscored_rows"} == values.keys()
    assert "eval/zeros/best@4" in values
    rewards = table(
        store, MEASURED.replace("WHERE", "WHERE e.batch = 4 AND"), "t.taskset, e.reward"
    )
    for name in ("addition", "zeros"):
        mean = rewards.filter(pl.col("taskset") == name)["reward"].mean()
        assert values[f"eval/{name}/reward_mean"] == pytest.approx(mean)
    assert values["eval/reward_mean"] == pytest.approx(rewards["reward"].mean())


@pytest.mark.parametrize("stream", [False, True], ids=["batches", "stream"])
def test_a_run_that_dies_while_it_is_measured_keeps_what_is_stored_and_tries_the_rest(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    settings = measuring(
        every=1,
        explorer={"workflow": "support.runs:dies_where_told"},
        evaluate={"batch_size": 1},
        trainer={"steps": 2, "checkpoint_every": 1},
        schedule={"preset": "asynchronous"} if stream else {},
    )
    monkeypatch.setattr(loop_parts, "DEADLY", ("eval-000001", "/0002/"))
    with pytest.raises(loop_parts.DeadError):
        run(store, settings)
    assert measured(store) == {0: 5, 1: 2}
    assert numbers(store, "eval/accuracy").keys() == {0}
    before = table(store, MEASURED, "e.experience_id, e.created_at")

    monkeypatch.setattr(loop_parts, "DEADLY", None)
    run(store, settings, resume=True)
    assert measured(store) == {0: 5, 1: 5, 2: 5}
    after = table(store, MEASURED, "e.experience_id, e.created_at")
    assert before.join(after, on=["experience_id", "created_at"]).height == before.height == 7
    assert numbers(store, "eval/accuracy").keys() == {0, 1, 2}


def test_a_checkpoint_may_be_kept_by_what_is_measured(store: Store) -> None:
    keep = {"last": 1, "highest": "eval/reward_mean"}
    settings = measuring(
        every=1,
        explorer={"rewards": "support.runs:small"},
        trainer={"steps": 5, "checkpoint_every": 1, "keep_checkpoints": keep},
    )
    run(store, settings)
    found = numbers(store, "eval/reward_mean")
    best = max((value, step) for step, value in found.items() if 0 < step < 5)[1]
    assert store.runs_folder is not None
    folder = store.runs_folder / "demo" / "checkpoints"
    kept = Checkpoints(folder, keep=settings.trainer.keep_checkpoints).steps()
    assert kept == [best, 5]


@pytest.fixture(scope="module")
def measured_lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with a run that was measured at its start and its end, to be copied."""
    folder = tmp_path_factory.mktemp("measured") / "lake"
    run(rlake.connect(folder), measuring(4))
    return folder


def test_rows_that_measure_a_policy_are_not_trained_on_unless_they_are_asked_for(
    measured_lake: Path, tmp_path: Path
) -> None:
    store = rlake.connect(shutil.copytree(measured_lake, tmp_path / "lake"))
    made = store.count("experiences")
    learn = {"trainer": {"batch_size": 8, "max_uses": 1}}
    run(store, offline(name="all", **learn))
    run(store, offline(name="asked", trainer={"where": "purpose = 'eval'"}))
    query = "draws_current d JOIN experiences e USING (experience_id)"
    drawn = table(store, query, "d.run_id, e.purpose = 'eval' AS measured").rows()
    assert {name: drawn.count(name) for name in set(drawn)} == {
        ("demo", False): made - 10,
        ("all", False): made - 10,
        ("asked", True): 10,
    }


def test_what_was_measured_while_the_run_went_on_is_not_measured_again(
    measured_lake: Path, tmp_path: Path
) -> None:
    store = rlake.connect(shutil.copytree(measured_lake, tmp_path / "lake"))
    found = evaluate_checkpoints(store, measuring(None))
    before = {one.policy_version: one.is_from_before for one in found}
    assert before[4]
    assert [one.reward_mean for one in found if one.is_from_before] == pytest.approx(
        [numbers(store, "eval/reward_mean")[v or 0] for v, was in before.items() if was]
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"every_steps": -1},
            "`evaluate.every_steps`: input should be greater than or equal to 1, got -1",
        ),
        ({"evry_steps": 2}, "unknown key `evaluate.evry_steps`; did you mean `every_steps`"),
        ({"where": "split = 'test'"}, "no task matches `split = 'test'`.*change `evaluate.where`"),
        ({"tasksets": {"additon": {}}}, "names `additon`, .* did you mean `addition`"),
        (
            {"tasksets": {"addition": {"pass_at": [4]}}},
            "`evaluate.tasksets.addition.group_size` is 1",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(
    store: Store, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(store, measuring(evaluate=changes))
    assert store.count("job_events") == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"explorer": None}, "evaluate.every_steps is for runs with an explorer"),
        ({"schedule": {"publish_every": 3, "max_ahead": 2}}, "multiple of .*publish_every, as 3"),
        (
            {"explorer": {"engine": {"endpoint": {"url": "http://127.0.0.1:1", "model": "m"}}}},
            "explorer.engine is an endpoint",
        ),
        (
            {"trainer": {"keep_checkpoints": {"highest": "eval/acuracy"}}},
            "`eval/acuracy`, which `evaluate` does not have; did you mean `eval/accuracy`",
        ),
    ],
)
def test_what_does_not_fit_the_rest_of_a_run_is_refused(changes: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        measuring(**changes)
