"""Folders that appear whole or not at all, also to those who look while they are written."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from rlake.loop.checkpoints import Checkpoints, write_folder
from rlake.store.errors import JobError, StoreError

REPLACING = """
import sys
from pathlib import Path
from rlake.loop.checkpoints import write_folder

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
    process = subprocess.Popen(
        [sys.executable, "-c", REPLACING, str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    seen = set()
    try:
        deadline, looks = time.monotonic() + 20, 0
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


FULL = """
import resource
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from rlake.loop.checkpoints import Checkpoints, write_folder
from rlake.store.errors import StoreError

folder, tensors = Path(sys.argv[1]), {"w": torch.zeros(100_000)}
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for write in (
    lambda: Checkpoints(folder, keep=1).write(1, tensors=tensors, facts={}),
    lambda: write_folder(folder / "v1", {"w": lambda path: save_file(tensors, str(path))}),
):
    try:
        write()
    except StoreError as error:
        print(error)
print(list(folder.iterdir()))
"""
"""Writes more than it may, as on a full disk."""


def test_a_full_disk_is_an_error_in_words_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    checkpoint, weights, left = done.stdout.splitlines()
    assert checkpoint.startswith(f"cannot write `{tmp_path}/step-000001`: ")
    assert weights.startswith(f"cannot write `{tmp_path}/v1`: ")
    assert left == "[]"


def state(value: float) -> dict[str, object]:
    return {"model": {"w": torch.full((50,), value)}, "lr": 0.1}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.steps() == []
    checkpoints.write(5, tensors=state(1.5), facts={"step": 5, "run_id": "demo"})
    tensors, facts = checkpoints.read(5)
    assert torch.equal(tensors["model"]["w"], torch.full((50,), 1.5))
    assert (tensors["lr"], facts) == (0.1, {"step": 5, "run_id": "demo"})


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 100, 15):
        checkpoints.write(step, tensors=state(step), facts={})
    assert checkpoints.steps() == [15, 100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000015", "step-000100"]


def test_a_checkpoint_is_replaced_by_a_later_attempt(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.write(5, tensors=state(1), facts={"attempt": 1})
    checkpoints.write(5, tensors=state(2), facts={"attempt": 2})
    tensors, facts = checkpoints.read(5)
    assert (tensors["model"]["w"][0], facts) == (2, {"attempt": 2})


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.write(5, tensors=state(1), facts={})

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "step-000010", {"state.pt": killed})
    assert checkpoints.steps() == [5]


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scribble(path: Path) -> None:
    path.write_bytes(b"this is not what was written\n" * 50)


@pytest.mark.parametrize("damage", [halve, empty, scribble, Path.unlink])
@pytest.mark.parametrize("name", ["state.pt", "facts.json"])
def test_a_damaged_checkpoint_is_an_error_that_names_it_and_the_way_out(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.write(5, tensors=state(1), facts={"step": 5, "run_id": "demo"})
    damage(tmp_path / "step-000005" / name)
    with pytest.raises(JobError, match=r"checkpoint `.*step-000005` cannot be read: .*; remove"):
        checkpoints.read(5)
