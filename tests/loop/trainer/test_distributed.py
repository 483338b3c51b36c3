"""Several processes train as one does; one that fails ends all, and says why."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.distributed import after, cases, continued, faulty, place, saved, settings
from support.jobs import told
from support.updates import assert_same, rows_of_a_step, step

import rlake
from rlake.loop.cli import run_command as command
from rlake.loop.run import train
from rlake.loop.trainer.distributed.launch import launched
from rlake.loop.trainer.distributed.world import SingleProcess, deal, is_lost
from rlake.loop.trainer.micro_batches import plan_micro_batches
from rlake.loop.weight_sync import newest
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError

TESTS = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_rows_are_dealt_in_units_so_that_each_process_has_about_as_many_tokens(size: int) -> None:
    lengths = [5, 17, 9, 12, 7, 3, 17, 10, 6, 14]
    units = [i // 2 for i in range(10)]
    dealt = deal(lengths, units, size)
    assert sorted(place for places in dealt for place in places) == list(range(10))
    for places in dealt:
        assert all(place ^ 1 in places for place in places)  # pairs stay together
    tokens = [sum(lengths[i] for i in places) for places in dealt]
    assert max(tokens) - min(tokens) <= 27  # the longest pair


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_all_processes_make_as_many_passes_and_each_row_counts_once(size: int) -> None:
    lengths = [5, 17, 9, 12, 7, 3, 17, 10, 6, 14]
    counted, passes = [], set()
    for rank in range(size):
        world = SingleProcess()
        world.rank, world.size = rank, size
        mine = world.share(
            lengths,
            list(range(10)),
            lambda places: [
                [places[i] for i in group]
                for group in plan_micro_batches([lengths[i] for i in places], 20)
            ],
        )
        counted += [place for places, counts in mine if counts for place in places]
        passes.add(len(mine))
    assert sorted(counted) == list(range(10))
    assert len(passes) == 1


def test_an_error_of_this_process_is_not_taken_for_a_lost_one() -> None:
    assert is_lost(RuntimeError("Connection reset by peer"))
    assert not is_lost(JobError("cannot write the checkpoint: connection refused"))
    assert not is_lost(ValueError("Connection reset by peer"))


@pytest.mark.slow
def test_two_processes_step_as_one_does_with_every_algorithm_and_take_over_from_it(
    tmp_path: Path,
) -> None:
    alone = SingleProcess()
    saved(alone, tmp_path / "one")
    done = subprocess.run(
        [*TORCHRUN, str(TESTS / "support" / "distributed.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "told.pt", weights_only=False)
    for algorithm in cases():
        ours = step(algorithm, rows_of_a_step(), micro_batch_tokens=1000)
        assert_same(ours, found["steps"][str(algorithm)])
    left_out, ours = found["faulty"], faulty(alone)
    assert [fault.experience_id for fault in ours.faults] == ["e3"]
    assert left_out.faults == ours.faults
    assert left_out.nll == pytest.approx(ours.nll, rel=1e-5)
    four, three = after(alone, 4), after(alone, 3)
    assert_close(four, found["weights"]["from one"])
    assert_close(four, continued(alone, tmp_path / "two"))
    assert_close(three, found["weights"]["repeated"])
    assert_close(three, found["weights"]["offloaded"])
    assert_close(after(alone, 3, adapter=True), found["weights"]["with an adapter"])


def assert_close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        scale = float(value.abs().max()) or 1.0
        assert float((value - other[name]).abs().max()) <= 1e-5 * scale, name


def weights(store: Store) -> Mapping[str, torch.Tensor]:
    """The newest weights that were published."""
    folder = store.runs_folder
    assert folder is not None
    return load_file(newest(store, folder / "demo", "demo").folder / "model.safetensors")


def kill_children_at(step: int) -> Callable[[str, int, Mapping[str, float]], None]:
    """What a run is told with: at a step it kills the processes of other ranks."""

    def listen(event: str, now: int, measured: Mapping[str, float]) -> None:
        if event == "train" and now == step:
            for task in Path("/proc/self/task").iterdir():
                for child in (task / "children").read_text().split():
                    if b"distributed.ranks" in Path(f"/proc/{child}/cmdline").read_bytes():
                        os.kill(int(child), signal.SIGKILL)

    return listen


@pytest.mark.slow
def test_a_run_of_two_processes_learns_what_one_learns_also_when_one_was_killed(
    tmp_path: Path,
) -> None:
    one, two, killed = (place(tmp_path / name) for name in ("one", "two", "killed"))
    train(one, settings())
    train(two, settings(world_size=2))
    assert told(two)["drawn"] == told(one)["drawn"]
    for ours, theirs in zip(told(one)["losses"], told(two)["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert_close(weights(one), weights(two))

    began = time.monotonic()
    with pytest.raises(JobError, match=r"process 1 of 2 was ended by signal 9 \(SIGKILL\)"):
        train(killed, settings(world_size=2), listener=kill_children_at(5))
    assert time.monotonic() - began < 200  # not what a timeout takes
    [(status, error)] = killed.sql(
        "SELECT status, error FROM job_events ORDER BY created_at DESC LIMIT 1"
    ).fetchall()
    assert (status, error) == ("failed", "process 1 of 2 was ended by signal 9 (SIGKILL)")
    train(killed, settings(world_size=2), resume=True)
    assert told(killed) == told(two)  # bit for bit
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_what_fails_in_another_process_ends_the_run_and_is_its_error(tmp_path: Path) -> None:
    store = place(tmp_path / "store")
    error = "process 1 of 2 failed: ValueError: two is one too many"
    with pytest.raises(JobError, match=error):
        train(store, settings(algorithm="support.distributed:FailsInTheSecond", world_size=2))
    [(status, text)] = store.sql(
        "SELECT status, error FROM job_events ORDER BY created_at DESC LIMIT 1"
    ).fetchall()
    assert (status, text) == ("failed", error)


@pytest.mark.slow
def test_torchrun_starts_the_processes_of_a_command(tmp_path: Path) -> None:
    place(tmp_path / "lake")
    place(tmp_path / "alone")
    (tmp_path / "run.json").write_text(settings().model_dump_json(exclude_none=True))
    (tmp_path / "run.json").rename(tmp_path / "run.yaml")
    done = subprocess.run(
        [*TORCHRUN, "-m", "rlake.loop.cli", "train", "run.yaml", "--store", "lake", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 8
    assert len(done.stdout.splitlines()) == 1  # the others say nothing
    assert command(["train", str(tmp_path / "run.yaml"), "--store", str(tmp_path / "alone")]) == 0
    assert_close(
        weights(rlake.connect(tmp_path / "alone")), weights(rlake.connect(tmp_path / "lake"))
    )


@pytest.mark.slow
def test_ray_starts_the_other_processes(tmp_path: Path) -> None:
    one, two = place(tmp_path / "one"), place(tmp_path / "two")
    train(one, settings())
    train(two, settings(world_size=2, launcher="ray"))
    assert_close(weights(one), weights(two))


@pytest.mark.parametrize(
    ("parallel", "error"),
    [
        (
            {"world_size": 4, "shard_size": 3},
            "shard 3 does not divide 4 processes; expected one of 1, 2",
        ),
        ({"world_size": 0}, "input should be greater than or equal to 1, got 0"),
        ({"launcher": "mpi"}, "input should be 'local', 'ray' or 'torchrun', got 'mpi'"),
    ],
)
def test_processes_that_cannot_be_are_refused(parallel: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        settings(**parallel)


@pytest.mark.parametrize(
    ("parallel", "environment", "error"),
    [
        (
            {"launcher": "torchrun"},
            {},
            "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are",
        ),
        ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not"),
        (
            {"world_size": 3},
            {"RANK": "0", "WORLD_SIZE": "2"},
            "`trainer.distributed.world_size` is 3, and torchrun started 2 processes",
        ),
        (
            {"shard_size": 3},
            {"RANK": "0", "WORLD_SIZE": "4"},
            "`trainer.distributed`: shard 3 does not divide 4 processes; expected one of 1, 2, 4",
        ),
    ],
)
def test_what_torchrun_did_not_say_or_says_otherwise_is_refused(
    parallel: Any, environment: dict[str, str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=error),
        launched(settings(**parallel), stop=threading.Event()),
    ):
        pass


def test_a_gpu_of_its_own_is_no_place_for_several_processes() -> None:
    config = settings(world_size=2)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"device": "cuda:1"})}
    )
    with (
        pytest.raises(ConfigError, match=r"`model\.device` is cuda:1, but each of 2"),
        launched(config, stop=threading.Event()),
    ):
        pass
