"""Experiment trackers get what the table `metrics` gets, and can neither stop nor slow a job."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import listening
from support.tiny_models import config
from support.trackers import TOLD, Down, Flaky, Hangs, Notes

from rlake.loop import cli
from rlake.loop.config import RunConfig
from rlake.loop.run import check, run
from rlake.loop.runs import trackers, tracking
from rlake.loop.runs.tracker import Tracked
from rlake.loop.runs.tracking import Line
from rlake.store import Store, connect
from rlake.store.errors import ConfigError, MissingExtraError

LOSSES = "SELECT step, value FROM metrics_current WHERE name = 'train/loss' ORDER BY step"


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    TOLD.clear()
    yield
    TOLD.clear()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits a test can bear."""
    monkeypatch.setattr(tracking, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.5)


def small(*specs: Any, **changes: Any) -> RunConfig:
    trainer = {"steps": 4, "batch_size": 2, "learning_rate": 1e-2, "checkpoint_every": 2}
    return config(trackers=list(specs), trainer=trainer, **changes)


def stopped_and_resumed(store: Store, settings: RunConfig) -> dict[int, float]:
    """Run, stop after step 3 when only 2 are in a checkpoint, resume; return the losses stored."""

    def listen(job: str, step: int, values: Mapping[str, float]) -> None:
        if (job, step) == ("train", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, settings, listener=listen)
    run(store, settings, resume=True)
    return dict(store.sql(LOSSES).fetchall())


def test_several_trackers_get_every_number_of_each_job(store: Store) -> None:
    run(store, small("support.trackers:Notes", {"support.trackers:Notes": {"title": "second"}}))
    stored = store.sql(
        "SELECT job, step, name, value FROM metrics WHERE value IS NOT NULL ORDER BY ALL"
    ).fetchall()
    for title in ("notes", "second"):
        mine = [told for told in TOLD if told[1] == title]
        starts = {told[2:] for told in mine if told[0] == "start"}
        assert starts == {("demo/train", 1), ("demo/explore", 1)}
        logged = [(t[2], k, v) for t in mine if t[0] == "log" for k, v in t[3].items()]
        assert sorted(logged) == sorted(row[1:] for row in stored)
        assert [told[0] for told in mine].count("close") == 2


def test_a_job_that_fails_says_so_to_its_trackers(store: Store) -> None:
    stopped_and_resumed(store, small("support.trackers:Notes"))
    fails = [told for told in TOLD if told[0] == "fail"]
    assert ("fail", "notes", "KeyboardInterrupt") in fails
    starts = [told[2:] for told in TOLD if told[0] == "start" and told[2] == "demo/train"]
    assert starts == [("demo/train", 1), ("demo/train", 3)]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("broken", ["Down", "Hangs"])
def test_a_tracker_that_is_down_or_hangs_never_stops_the_run(
    store: Store, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(store, small(f"support.trackers:{broken}", "support.trackers:Notes"))
    assert len(store.sql(LOSSES).fetchall()) == 4
    assert [told[0] for told in TOLD].count("close") == 2, "the others go on"
    counts = dict(
        store.sql(
            "SELECT split_part(name, '/', 3), sum(value) FROM metrics "
            f"WHERE name LIKE 'trackers/{broken}/%' GROUP BY ALL"
        ).fetchall()
    )
    assert counts["failures"] >= 2
    assert counts["lost"] > 10
    warnings = [r.getMessage() for r in caplog.records if "failed: no server" in r.getMessage()]
    assert len(warnings) == (2 if broken == "Down" else 0), "each job says it once"


TRACKED = Tracked("demo", "train", "key", 1, 1, Path(), {})


def logged() -> list[int]:
    """Return the steps that trackers took."""
    return [told[2] for told in TOLD if told[0] == "log"]


def lined(tracker: Any, *, numbers: int = 5, most: int = 1000) -> Line:
    """Give a tracker numbers, and wait until it is done with them."""
    line = Line("it", tracker, most)
    for step in range(1, numbers + 1):
        line.put(step, {"train/loss": float(step)})
    line.start(TRACKED)
    deadline = time.monotonic() + 60
    while line.lost + len(logged()) < numbers and time.monotonic() < deadline:
        time.sleep(0.002)
    line.end(None)
    line.join(20)
    return line


@pytest.mark.usefixtures("hasty")
def test_numbers_that_a_tracker_refuses_are_offered_again_in_their_order() -> None:
    line = lined(Flaky())
    assert logged() == [1, 2, 3, 4, 5]
    assert (line.failures, line.lost) == (10, 0)


@pytest.mark.usefixtures("hasty")
def test_a_tracker_that_refuses_everything_is_given_up() -> None:
    line = lined(Down(), numbers=50)
    assert line.failures == tracking.MAX_CALLS * tracking.MOST_REFUSED
    assert line.lost == 50
    line.put(51, {"train/loss": 1.0})
    assert (line.waiting, line.lost) == (0, 51)


def test_what_waits_for_a_tracker_is_bounded_and_the_newest_stays() -> None:
    line = lined(Notes(), numbers=100, most=10)
    assert logged() == list(range(91, 101))
    assert line.lost == 90


def test_a_step_never_waits_for_a_tracker() -> None:
    line = Line("it", Hangs(), 1000)  # which never answers
    line.start(TRACKED)
    began = time.perf_counter()
    for step in range(1000):
        line.put(step, {"train/loss": 1.0})
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tensorbord", "tracker `tensorbord` does not exist; did you mean `tensorboard`"),
        ({"wandb": {"projekt": "x"}}, "`wandb` has no parameter `projekt`; did you mean `project`"),
        ({"tensorboard": {"x": 1}}, "`tensorboard` has no parameter `x`; known are `folder`$"),
        ({"wandb": {"mode": "later"}}, "`wandb` parameter `mode`: input should be 'online', 'off"),
        ({"support.trackers:Notes": {"colour": 1}}, "`support.trackers:Notes` cannot be made so"),
        ("support.trackers:Nothing", "no tracker `support.trackers:Nothing`"),
        ({"wandb": {}, "mlflow": {}}, "each entry is one tracker, got wandb, mlflow"),
    ],
)
def test_a_tracker_that_there_is_not_is_refused_before_any_work(spec: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(small(spec))


@pytest.mark.parametrize("name", trackers.names())
def test_a_tracker_that_is_not_installed_says_which_extra_has_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rlake\[trackers\]'"):
        check(small(name))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_tensorboard_shows_each_step_once_after_a_resume(store: Store) -> None:
    losses = stopped_and_resumed(store, small("tensorboard"))
    folder = Path(store.uri) / "runs" / "demo" / "tensorboard"
    shown = scalars(folder / "train")
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3, 4]
    assert dict(shown["train/loss"]) == pytest.approx(losses, rel=1e-6, abs=1e-9)
    assert "explore/reward_mean" in scalars(folder / "explore")


def test_the_command_says_which_trackers_write_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = ["tensorboard", {"wandb": {"mode": "offline"}}, "support.trackers:Notes"]
    settings = small("tensorboard").model_dump(mode="json") | {"trackers": specs}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    lake = tmp_path / "lake"
    connect(lake)  # else the configuration is refused before a store is made
    args = ["train", str(tmp_path / "c.yaml"), "--store", str(lake), "--set", "explorer=null"]
    assert cli.run_command(args) == cli.MISUSED, "there is nothing to train on"
    said = capsys.readouterr().err
    assert f"tracker tensorboard: {lake}/runs/demo/tensorboard\n" in said
    assert f"tracker wandb: {lake}/runs/demo/wandb (offline)\n" in said
    assert "tracker Notes: Notes\n" in said


def records(file: Path, reader: Any, kind: Any) -> Iterator[Any]:
    """Yield the records of a tracker's own log file."""
    opened = reader()
    opened.open(file)
    while (data := opened.scan()) is not None:
        yield kind.FromString(data)
    opened.close()


def wandb_steps(folder: Path, key: str) -> dict[str, list[tuple[int, float]]]:
    """Return what offline files of Weights & Biases hold of a metric, by their run's id."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        own = found.setdefault(file.stem, [])
        for record in records(file, WBDataStoreReader, Record):
            if record.WhichOneof("record_type") == "history":
                items = {i.nested_key[0]: i.value_json for i in record.history.item}
                if key in items:
                    own.append((record.history.step.num, json.loads(items[key])))
    return found


def swanlab_steps(folder: Path, key: str) -> list[tuple[int, float]]:
    """Return what offline files of SwanLab hold of a metric, file after file."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    return [
        (record.scalar.step, record.scalar.value.number)
        for file in sorted(folder.glob("run-*/*.swanlab"))
        for record in records(file, DataStoreReader, Record)
        if record.WhichOneof("record_type") == "scalar" and record.scalar.key == key
    ]


def mlflow_steps(uri: str, name: str, key: str) -> list[tuple[int, float]]:
    """Return a metric's history in the one run of that name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("rlake")
    assert experiment is not None
    query = f"tags.`mlflow.runName` = '{name}'"
    [found] = client.search_runs([experiment.experiment_id], query)
    assert found.info.status == "FINISHED"
    assert found.data.params["trainer.steps"] == "4"
    return [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, key)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the trackers' own code
def test_wandb_mlflow_and_swanlab_hold_what_a_resumed_run_stored(store: Store) -> None:
    losses = stopped_and_resumed(
        store, small({"wandb": {"mode": "offline"}}, "mlflow", {"swanlab": {"mode": "offline"}})
    )
    folder = Path(store.uri) / "runs" / "demo"
    attempts = [(1, losses[1]), (2, losses[2]), (3, losses[3]), (3, losses[3]), (4, losses[4])]

    assert sorted(mlflow_steps(str(folder / "mlruns"), "demo/train", "train/loss")) == sorted(
        losses.items()
    ), "no step twice"
    by_run = wandb_steps(folder, "train/loss")
    [train] = [run for run, steps in by_run.items() if steps]
    assert train.startswith("run-demo-train-"), "both attempts are one run"
    assert len(list(folder.glob(f"wandb/offline-run-*/{train}.wandb"))) == 2
    assert by_run[train] == attempts
    assert any(s for r, s in wandb_steps(folder, "explore/rows").items() if "explore" in r)
    assert swanlab_steps(folder / "swanlog", "train/loss") == attempts
    assert len(swanlab_steps(folder / "swanlog", "explore/rows")) >= 4
    failed = "SELECT name, value FROM metrics WHERE name LIKE 'trackers/%'"
    assert store.sql(failed).fetchall() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_jobs_that_begin_at_once_share_one_mlflow_experiment(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    from rlake.loop.runs.trackers.mlflow import Mlflow

    def begin(job: str, folder: Path, both: threading.Barrier) -> None:
        both.wait(60)
        Mlflow().start(replace(TRACKED, job=job, key=job, folder=folder))

    for i in range(10):  # two experiments in 3 of 4 rounds when a job does not wait for the other
        folder, both = tmp_path / str(i), threading.Barrier(2)
        with ThreadPoolExecutor(2) as jobs:
            list(jobs.map(lambda job, at=folder, b=both: begin(job, at, b), ("train", "explore")))
        client = MlflowClient(tracking_uri=str(folder / "mlruns"))
        [experiment] = client.search_experiments(filter_string="name = 'rlake'")
        assert len(client.search_runs([experiment.experiment_id])) == 2


SERVER = """
import sys
from werkzeug.serving import make_server
from mlflow.server import app
make_server("127.0.0.1", 0, app, threaded=True, fd=int(sys.argv[1])).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a real MLflow server."""
    env = {
        **os.environ,
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "_MLFLOW_SERVER_FILE_STORE": str(tmp_path / "served"),
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(tmp_path / "served"),
    }
    with listening([sys.executable, "-W", "ignore", "-c", SERVER], env=env) as address:
        yield address


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_goes_on_in_the_same_run_of_a_server(store: Store, server: str) -> None:
    losses = stopped_and_resumed(store, small({"mlflow": {"uri": server}}))
    assert sorted(mlflow_steps(server, "demo/train", "train/loss")) == sorted(losses.items())
    assert len(mlflow_steps(server, "demo/explore", "explore/rows")) == 4
