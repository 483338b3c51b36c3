"""Folders that appear whole or not at all, also to those who look while they are written."""

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from support.processes import said, start
from support.tiny_models import config, offline
from support.tiny_models import written as written_rows

from rlake.loop.config import KeepConfig, TrainerConfig
from rlake.loop.models.atomic_folder import write_folder
from rlake.loop.run import run, train
from rlake.loop.runs.job import run_folder
from rlake.loop.trainer.checkpoints import Checkpoints
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError, StoreError

REPLACING = """
import sys
from pathlib import Path
from rlake.loop.models.atomic_folder import write_folder

target, round_ = Path(sys.argv[1]), 0
while True:
    round_ += 1
    text = str(round_)
    write_folder(target, {f"{i:03d}": lambda path: path.write_text(text) for i in range(100)})
    if round_ == 1:
        print("begun", flush=True)
"""
"""Replaces a folder of a hundred files again and again."""


def frozen(process: "subprocess.Popen[str]") -> None:
    """Stop a process wherever it is, and wait until it stands."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_a_process_stopped_or_killed_at_any_moment_leaves_a_folder_whole_or_none(
    tmp_path: Path,
) -> None:
    target = tmp_path / "out" / "v1"
    process = start(REPLACING, target)
    assert said(process) == "begun"
    seen = set()
    try:
        deadline, looks = time.monotonic() + 100, 0
        while looks < 60 or (len(seen) <= 5 and time.monotonic() < deadline):
            looks += 1
            time.sleep(0.001 + looks % 7 * 0.001)
            frozen(process)
            if target.exists():
                files = list(target.iterdir())
                rounds = {path.read_text() for path in files}
                assert (len(files), len(rounds)) == (100, 1)
                seen |= rounds
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.communicate()
    assert len(seen) > 5
    if target.exists():
        assert len(list(target.iterdir())) == 100
    write_folder(target, {"one": lambda path: path.write_text("1")})
    assert [p.name for p in target.parent.iterdir()] == ["v1"]
    assert [p.name for p in target.iterdir()] == ["one"]


def test_a_folder_is_not_there_until_its_last_file_is(tmp_path: Path) -> None:
    target = tmp_path / "v1"
    seen: list[bool] = []

    def write(path: Path) -> None:
        seen.append(target.exists())
        path.write_text("x")

    write_folder(target, {"a": write, "b": write}, durable=True)
    assert seen == [False, False]
    assert sorted(p.name for p in target.iterdir()) == ["a", "b"]


def test_a_writer_that_fails_leaves_the_old_folder_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "v1"
    write_folder(target, {"a": lambda path: path.write_text("old")})

    def full(path: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(StoreError, match=r"cannot write `.*v1`: no space left on device; nothing"):
        write_folder(target, {"a": lambda path: path.write_text("new"), "b": full})
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]
    assert {p.name: p.read_text() for p in target.iterdir()} == {"a": "old"}


@pytest.mark.parametrize("error", [RuntimeError("torch\nfailed"), SafetensorError("I/O")])
def test_what_libraries_raise_when_they_cannot_write_is_one_line(
    tmp_path: Path, error: Exception
) -> None:
    def full(path: Path) -> None:
        path.write_text("half")
        raise error

    with pytest.raises(StoreError, match=r"cannot write `.*v1`: .*; nothing half-written is left$"):
        write_folder(tmp_path / "v1", {"a": full})
    assert list(tmp_path.iterdir()) == []


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 100 kB, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_in_words_and_leaves_nothing(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(100_000)}
    checkpoints = Checkpoints(tmp_path, keep=KeepConfig())
    with full_disk():
        checkpoints.write(1, state=tensors, facts={})
        with pytest.raises(StoreError, match=r"cannot write `.*/step-000001`: "):
            checkpoints.wait()
    with full_disk(), pytest.raises(StoreError, match=r"cannot write `.*/v1`: "):
        write_folder(tmp_path / "v1", {"w": lambda path: save_file(tensors, str(path))})
    assert list(tmp_path.iterdir()) == []


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((50,), value), "b": torch.tensor(value)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"betas": (0.9, 1)}]},
        "lr": 0.1,
    }


def written(folder: Path, *steps: int, keep: KeepConfig | None = None, **metrics: Any) -> Path:
    """Write checkpoints of some steps; of each metric, one value a step."""
    checkpoints = Checkpoints(folder, keep=keep or KeepConfig())
    for i, step in enumerate(steps):
        facts = {"step": step, "metrics": {name: values[i] for name, values in metrics.items()}}
        checkpoints.write(step, state=state(step), facts=facts)
    checkpoints.wait()
    return folder


def read(folder: Path, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return Checkpoints(folder, keep=KeepConfig()).read(step)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=KeepConfig())
    assert checkpoints.steps() == []
    checkpoints.write(5, state=state(1.5), facts={"step": 5, "run_id": "demo"})
    checkpoints.wait()
    found, facts = checkpoints.read(5)
    assert torch.equal(found["model"]["w"], torch.full((50,), 1.5))
    assert found["model"]["b"].shape == ()
    assert found["optimizer"] == state(1.5)["optimizer"]
    assert (found["lr"], facts) == (0.1, {"step": 5, "run_id": "demo"})


def test_a_checkpoint_is_of_the_moment_when_it_was_begun(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=KeepConfig())
    held = {"w": torch.zeros(3_000_000)}
    checkpoints.write(1, state=held, facts={})
    held["w"].fill_(7.0)  # training goes on
    checkpoints.wait()
    assert float(checkpoints.read(1)[0]["w"].abs().sum()) == 0.0


def test_the_newest_are_kept(tmp_path: Path) -> None:
    written(tmp_path, 5, 10, 100, 15)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000015", "step-000100"]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({"last": 1}, [6]),
        ({"last": 1, "every": 2}, [2, 4, 6]),
        ({"last": 2, "lowest": "eval/loss"}, [3, 5, 6]),
        ({"last": 1, "highest": "eval/loss"}, [5, 6]),
        ({"last": 1, "every": 4, "highest": "eval/absent"}, [4, 6]),
    ],
)
def test_a_rule_says_which_are_kept(tmp_path: Path, keep: Any, kept: list[int]) -> None:
    loss = [0.5, 0.4, 0.2, 0.3, 0.9, 0.6]
    written(tmp_path, 1, 2, 3, 4, 5, 6, keep=KeepConfig(**keep), **{"eval/loss": loss})
    assert Checkpoints(tmp_path, keep=KeepConfig()).steps() == kept


def test_of_equally_good_ones_the_newest_is_kept(tmp_path: Path) -> None:
    keep = KeepConfig(last=1, lowest="eval/loss")
    written(tmp_path, 1, 2, 3, keep=keep, **{"eval/loss": [0.2, 0.2, 0.4]})
    assert Checkpoints(tmp_path, keep=KeepConfig()).steps() == [2, 3]


def test_a_number_alone_is_that_of_the_newest() -> None:
    assert TrainerConfig.model_validate({"keep_checkpoints": 5}).keep_checkpoints.last == 5


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        (0, "`trainer.keep_checkpoints.last`: input should be greater than or equal to 1, got 0"),
        ({"lasst": 2}, "unknown key `trainer.keep_checkpoints.lasst`; did you mean `last`"),
        ({"highest": "eval/a", "lowest": "eval/b"}, "has both `highest` and `lowest`"),
        ({"lowest": "loss"}, "`loss` is not a metric of a trainer"),
        ({"lowest": "eval/loss"}, "`eval/loss` is evaluated on `trainer.eval_where`, or by"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(keep: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        offline(trainer={"keep_checkpoints": keep})


def test_a_checkpoint_is_replaced_by_a_later_attempt(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=KeepConfig())
    checkpoints.write(5, state=state(1), facts={"attempt": 1})
    checkpoints.write(5, state=state(2), facts={"attempt": 2})
    checkpoints.wait()
    found, facts = checkpoints.read(5)
    assert (found["model"]["w"][0], facts) == (2, {"attempt": 2})


def test_a_writer_that_fails_in_the_background_ends_the_next_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file where the folder should be")
    checkpoints = Checkpoints(tmp_path / "c", keep=KeepConfig())
    checkpoints.write(5, state=state(1), facts={})
    with pytest.raises(StoreError, match=r"cannot write `.*step-000005`: .*"):
        checkpoints.write(6, state=state(1), facts={})


def test_a_writer_that_fails_ends_the_run(store: Store) -> None:
    store.append("experiences", written_rows(8))
    settings = offline(trainer={"max_uses": 4, "batch_size": 8, "checkpoint_every": 1})
    folder = run_folder(store, settings)

    def block(event: str, step: int, measured: Mapping[str, float]) -> None:
        if event == "train" and step == 1:
            (folder / "checkpoints").write_text("a file where the folder should be")

    with pytest.raises(StoreError, match=r"cannot write `.*step-000001`"):
        train(store, settings, listener=block)
    [(status, error)] = store.sql(
        "SELECT status, error FROM job_events QUALIFY created_at = max(created_at) OVER ()"
    ).fetchall()
    assert status == "failed"
    assert "step-000001" in error


WRITING = """
import sys
from pathlib import Path
import torch
from rlake.loop.config import KeepConfig
from rlake.loop.trainer.checkpoints import Checkpoints

checkpoints, step = Checkpoints(Path(sys.argv[1]), keep=KeepConfig(last=2)), 0
while True:
    step += 1
    tensors = {str(i): torch.full((20_000,), float(step)) for i in range(20)}
    checkpoints.write(step, state=tensors, facts={"step": step})
    if step == 3:
        print("begun", flush=True)
"""
"""Writes checkpoints one after the other."""


@pytest.mark.parametrize("disk", ["slow", "fast"])
def test_which_weights_stay_does_not_depend_on_how_fast_the_disk_is(
    store: Store, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    begin = Checkpoints.write

    def write(own: Checkpoints, step: int, **parts: Any) -> None:
        begin(own, step, **parts)
        if disk == "fast":
            own.wait()

    monkeypatch.setattr(Checkpoints, "write", write)
    run(store, config(trainer={"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 1}))
    assert store.runs_folder is not None
    left = sorted(path.name for path in (store.runs_folder / "demo" / "policies").iterdir())
    assert left == ["v000002", "v000003", "v000004"], "what a run resumed from step 3 samples with"


def test_a_kill_while_one_is_written_leaves_whole_ones_only(tmp_path: Path) -> None:
    process = start(WRITING, tmp_path)
    assert said(process) == "begun"
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob(".step-*.partial/*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    checkpoints = Checkpoints(tmp_path, keep=KeepConfig())
    assert checkpoints.steps()
    for step in checkpoints.steps():
        found, facts = checkpoints.read(step)
        assert facts == {"step": step}
        assert all(torch.equal(t, torch.full((20_000,), float(step))) for t in found.values())


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scribble(path: Path) -> None:
    path.write_bytes(b"this is not what was written\n" * 500)


@pytest.mark.parametrize("damage", [halve, empty, scribble, Path.unlink])
@pytest.mark.parametrize("name", ["rest.pt", "facts.json", ".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_an_error_that_names_it_and_the_way_out(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    written(tmp_path, 5)
    damage(tmp_path / "step-000005" / name)
    with pytest.raises(JobError, match=r"checkpoint `.*step-000005` cannot be read: .*; remove"):
        read(tmp_path, 5)
