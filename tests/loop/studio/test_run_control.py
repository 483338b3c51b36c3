import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlake.loop.studio import run_control
from rlake.loop.studio.run_control import RunControl
from rlake.loop.studio.run_status import status_of
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError, NotFoundError

SMALL = ["trainer.steps=10000", "trainer.batch_size=4", "name=mine"]


def test_a_studio_that_reads_starts_nothing(store: Store) -> None:
    control = RunControl(store, can_write=False)
    with pytest.raises(ConfigError, match="start it with `rlake studio --write`"):
        asyncio.run(control.start("grpo_digits"))
    with pytest.raises(ConfigError, match="only reads"):
        asyncio.run(control.resume("mine"))
    with pytest.raises(ConfigError, match="only reads"):
        control.stop("mine")


def test_what_cannot_run_is_refused_before_a_process_starts(store: Store) -> None:
    control = RunControl(store, can_write=True)
    with pytest.raises(ConfigError, match="recipe `grpo_digit` does not exist"):
        asyncio.run(control.start("grpo_digit"))
    with pytest.raises(NotFoundError, match="was never started"):
        asyncio.run(control.resume("mine"))
    job = {"run_id": "mine", "name": "mine", "attempt": 1, "job": "train", "status": "running"}
    store.append("job_events", [job | {"config": "{}", "code_version": "0", "start_step": 1}])
    with pytest.raises(ConfigError, match=r"`mine` was started before \(its `train` is running\)"):
        asyncio.run(control.start("grpo_digits", SMALL))
    assert control.output("mine") is None
    with pytest.raises(NotFoundError, match="was not started here"):
        control.stop("mine")


@pytest.mark.long
def test_a_run_is_started_once_stopped_and_resumed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two people start the same run: the second is told; one that was stopped goes on."""
    monkeypatch.setattr(run_control, "START_SECONDS", 60.0)
    one, other = RunControl(store, can_write=True), RunControl(store, can_write=True)

    def steps() -> int:
        found = "SELECT coalesce(max(step), 0) FROM metrics WHERE job = 'train'"
        return store.sql(found).fetchall()[0][0]

    def until(step: int) -> None:
        looking = {"tables": ["metrics"], "seconds": 200, "describe": lambda: f"step {step}"}
        store.wait_for(lambda: steps() >= step or None, **looking)  # pyright: ignore[reportArgumentType]

    async def scenario() -> None:
        starting = asyncio.ensure_future(one.start("grpo_digits", SMALL))
        await asyncio.to_thread(until, 1)
        assert one.is_mine("mine")
        with pytest.raises(JobError, match="running already"):
            await one.resume("mine")
        with pytest.raises(ConfigError, match="started before"):
            await other.start("grpo_digits", SMALL)
        one.stop("mine")
        with pytest.raises(JobError, match="interrupted"):
            await starting
        jobs = store.sql("SELECT job, status FROM runs").to_arrow_table().to_pylist()
        assert status_of(store, "mine", jobs) == "interrupted"
        before = steps()
        resuming = asyncio.ensure_future(one.resume("mine"))
        await asyncio.to_thread(until, before + 1)
        one.stop("mine")
        with pytest.raises(JobError, match="interrupted"):
            await resuming

    asyncio.run(scenario())


def test_a_run_whose_process_is_gone_is_dead(store: Store, tmp_path: Path) -> None:
    assert store.runs_folder is not None
    lock = store.runs_folder / "mine" / ".train.lock"
    lock.parent.mkdir(parents=True)
    code = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); "
    code += "print(1, flush=True); "
    code += "sys.stdin.read()"
    jobs = [{"job": "train", "status": "running"}]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert status_of(store, "mine", jobs) == "running"
        process.send_signal(signal.SIGKILL)
    assert status_of(store, "mine", jobs) == "dead"
