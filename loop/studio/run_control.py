"""Start, stop and resume runs, each in a process of its own: only with `--write`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from ...store import Store
from ...store.errors import ConfigError, JobError, NotFoundError
from ..config import load
from ..runs.job import check_new, newest_config

START_SECONDS = 8.0
"""How long a start is watched for an error, in seconds."""
_SAID = 2000
"""Most characters of what a process printed that an error shows."""


class RunControl:
    """The runs that this process started; they go on when it ends.

    Two people may start the same run: the second process finds the lock of the first, or its row in
    `job_events`, and what it says is the error.
    """

    def __init__(self, store: Store, *, can_write: bool) -> None:
        self._store, self._can_write = store, can_write
        self._started: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}

    async def start(self, config: str, changes: Sequence[str] = ()) -> str:
        """Start a run of a YAML file or a recipe, and return its name.

        Raises ConfigError for an invalid configuration and for a run that was started before,
        JobError if the run does not start.
        """
        self._check()
        name = (await asyncio.to_thread(load, config, list(changes))).name
        if not self.is_mine(name):  # its process says so too, but a busy machine starts it late
            await asyncio.to_thread(check_new, self._store, name, "train")
        words = [config, *(word for change in changes for word in ("--set", change))]
        await self._launch(name, words)
        return name

    async def resume(self, run_id: str) -> None:
        """Continue a run with the configuration of its newest attempt.

        Raises NotFoundError for a run that never started, JobError if it does not continue.
        """
        self._check()
        stored = await asyncio.to_thread(newest_config, self._store, run_id)
        if stored is None:
            raise NotFoundError(f"run `{run_id}` was never started; start it by its YAML file")
        path = Path(mkdtemp(prefix="rlake-studio-")) / "config.yaml"  # JSON is YAML
        path.write_text(json.dumps(json.loads(stored)), encoding="utf-8")
        await self._launch(run_id, [str(path), "--resume"])

    def stop(self, run_id: str) -> None:
        """Interrupt a run as Ctrl-C does; NotFoundError for one that was started elsewhere."""
        self._check()
        if not self.is_mine(run_id):
            raise NotFoundError(
                f"run `{run_id}` was not started here; press Ctrl-C where it was started"
            )
        os.killpg(self._started[run_id][0].pid, signal.SIGINT)

    def is_mine(self, run_id: str) -> bool:
        """Return whether a process that was started here does this run."""
        return run_id in self._started and self._started[run_id][0].poll() is None

    def output(self, run_id: str) -> str | None:
        """Return the end of what a run that was started here printed."""
        if run_id not in self._started:
            return None
        return self._started[run_id][1].read_text(encoding="utf-8", errors="replace")[-_SAID:]

    def _check(self) -> None:
        if not self._can_write:
            raise ConfigError("this studio only reads; start it with `rlake studio --write`")

    async def _launch(self, name: str, words: Sequence[str]) -> None:
        if self.is_mine(name):
            raise JobError(f"run `{name}` is running already; open its page, or stop it first")
        log = Path(mkdtemp(prefix="rlake-studio-")) / "output.txt"
        command = [sys.executable, "-m", "rlake.loop.cli", "--store", self._store.uri]
        command += ["run", *words]
        with log.open("wb") as file:
            # a session of its own: Ctrl-C for the studio does not end its runs
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        before = self._started.get(name)
        self._started[name] = process, log
        ended = asyncio.ensure_future(asyncio.to_thread(process.wait, START_SECONDS))
        try:
            code = await ended
        except subprocess.TimeoutExpired:
            return
        if code:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if before is not None:
                self._started[name] = before
            raise JobError(said[-1].removeprefix("error: ") if said else f"it ended with {code}")
