"""Writers, a training run and care, killed again and again: then one audit of what is stored."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lance
import pytest
from support.audit import CLEAN, audit
from support.jobs import drawn
from support.jobs import start as start_job

import rlake
from rlake.store import Store

HERE = Path(__file__).parents[1]

WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import rlake
from support.builders import experiences
lake, me, log = rlake.connect(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
done = len(log.read_text().splitlines()) if log.exists() else 0
with log.open("a") as told:
    while not (log.parent / "stop").exists():
        done += 1  # perhaps stored already, and not told: it is tried again
        made = experiences(4, reward=1.0, run_id=me, batch=done, group_id=f"{me}/{done:06d}")
        ids = [f"{me}/{done:06d}/{i:02d}" for i in range(4)]
        lake.append("experiences", [{**e.row(), "experience_id": i} for e, i in zip(made, ids)])
        print(done, file=told, flush=True)
        time.sleep(0.02)  # leaves the others some of the machine
"""

CARE = """
import sys, time
from pathlib import Path
import rlake
lake, log = rlake.connect(sys.argv[1]), Path(sys.argv[2])
with log.open("a") as told:
    while not (log.parent / "stop").exists():
        lake.maintain()
        print("cared", file=told, flush=True)
        time.sleep(0.2)
"""


@dataclass
class Job:
    """A process that is started again whenever it is killed."""

    start: Callable[[bool], "subprocess.Popen[str]"]
    progress: Callable[[], int]
    weight: int
    process: "subprocess.Popen[str]" = field(init=False)
    before: int = 0

    def begin(self, *, again: bool) -> None:
        self.before = self.progress()
        self.process = self.start(again)

    @property
    def got_on(self) -> bool:
        """Whether it did something since it was started."""
        return self.progress() > self.before and self.process.poll() is None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def lines(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def jobs(tmp_path: Path, steps: int) -> Iterator[dict[str, Job]]:
    """Two writers, care, and a run, all on the store `lake`."""
    lake = tmp_path / "lake"
    rlake.connect(lake)

    def writer(me: str) -> Job:
        log = tmp_path / me
        return Job(lambda _: python(WRITER, HERE, lake, me, log), lambda: lines(log), 6)

    def run(again: bool) -> "subprocess.Popen[str]":  # noqa: FBT001
        sets = ["--set", f"trainer.steps={steps}"]
        resume = ["--resume"] if again else []
        return start_job(tmp_path, "run", "small.yaml", "--store", "lake", *sets, *resume)

    care = tmp_path / "care"
    made = {
        "a": writer("a"),
        "b": writer("b"),
        "care": Job(lambda _: python(CARE, lake, care), lambda: lines(care), 4),
        "run": Job(run, lambda: drawn(lake), 2),
    }
    yield made
    for job in made.values():
        if job.process.poll() is None:
            job.kill()


def wreak(jobs: dict[str, Job], *, kills: int, seed: int) -> dict[str, int]:
    """Kill jobs at random moments, each time one that got on since it was started."""
    chance = random.Random(seed)
    killed = dict.fromkeys(jobs, 0)
    for job in jobs.values():
        job.begin(again=False)
    deadline = time.monotonic() + 240
    while sum(killed.values()) < kills:
        assert time.monotonic() < deadline, f"only {killed}"
        time.sleep(chance.uniform(0.0, 0.3))
        ready = {name: job for name, job in jobs.items() if job.got_on}
        if ready:
            [name] = chance.choices(list(ready), [job.weight for job in ready.values()])
            jobs[name].kill()
            jobs[name].begin(again=True)
            killed[name] += 1
    return killed


def end(jobs: dict[str, Job], folder: Path) -> None:
    """Let the run come to its end, then the others to theirs."""
    for name in ("run", "a", "b", "care"):
        _, told = jobs[name].process.communicate(timeout=100)
        assert jobs[name].process.returncode == 0, f"{name}: {told}"
        (folder / "stop").touch()


def acknowledged(folder: Path) -> list[str]:
    """Return the ids that the writers were told are stored."""
    return [
        f"{me}/{n:06d}/{i:02d}"
        for me in ("a", "b")
        for n in range(1, lines(folder / me) + 1)
        for i in range(4)
    ]


@pytest.mark.parametrize(
    ("kills", "steps"), [pytest.param(50, 40, marks=[pytest.mark.slow, pytest.mark.timeout(500)])]
)
def test_after_any_kills_nothing_is_lost_doubled_or_skipped(
    tmp_path: Path, jobs: dict[str, Job], kills: int, steps: int
) -> None:
    killed = wreak(jobs, kills=kills, seed=kills)
    end(jobs, tmp_path)
    ids = acknowledged(tmp_path)
    store = rlake.connect(tmp_path / "lake")
    assert audit(store, ids) == CLEAN
    assert drawn(tmp_path / "lake") == steps
    assert len(ids) >= 4 * (killed["a"] + killed["b"]), "writers got on between the kills"
    check_that_faults_are_found(tmp_path, ids)


def check_that_faults_are_found(folder: Path, ids: list[str]) -> None:
    """Plant one fault after the other, each in a copy of the store."""

    def faulty(name: str) -> Store:
        shutil.copytree(folder / "lake", folder / name)
        return rlake.connect(folder / name)

    lake = faulty("lost")
    lake.open_at("experiences").delete(f"experience_id = '{ids[5]}'")
    found = audit(lake, ids)
    assert found["lost"] == [(ids[5],)]
    assert found["duplicated"] == []

    lake = faulty("doubled")
    row = lake.open_at("experiences").to_table(filter=f"experience_id = '{ids[7]}'")
    lance.write_dataset(row, lake.open_at("experiences"), mode="append")
    assert audit(lake, ids) == CLEAN | {"duplicated": [("experiences", ids[7])]}

    lake = faulty("undrawn")
    [(row_id,)] = lake.sql(
        "SELECT experience_id FROM draws_current WHERE step = 9 AND position = 1"
    ).fetchall()
    lake.open_at("draws").delete(f"step = 9 AND experience_id = '{row_id}'")
    assert audit(lake, ids) == CLEAN | {
        "skipped": [("step", "small/9"), ("row never drawn", row_id)]
    }

    lake = faulty("gap")
    lake.open_at("experiences").delete("run_id = 'small' AND batch = 3")
    assert ("batch", "small") in audit(lake, ids)["skipped"]
