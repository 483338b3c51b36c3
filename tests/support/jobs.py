"""Runs of a few seconds in real processes, and what their stores say afterwards."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rlake
from rlake.loop.config import load
from rlake.loop.inference.policy import Policy
from rlake.loop.run import run
from rlake.loop.workflows import single_turn
from rlake.store import Store
from rlake.store.errors import NotAStoreError

HERE = Path(__file__).parents[1]

CONFIG = """
name: small
seed: 3
threads: 1
model:
  from_scratch: {hidden_size: 32, layers: 1, heads: 2, max_length: 16, alphabet: "01234+="}
tasks:
  generator: {rlake.loop.recipes.toys:addition: {low: 0, high: 4, held_out: 5}}
algorithm: {grpo: {group_size: 4}}
explorer:
  workflow: support.jobs:until_the_last_batch
  rewards: support.jobs:even_digits
  sampling: {max_tokens: 3}
trainer:
  steps: 16
  batch_size: 4
  learning_rate: 5.0e-3
  checkpoint_every: 5
evaluate:
  sampling: {max_tokens: 3, temperature: 0}
"""
"""A GRPO run that learns something in each step, so that a wrong row shows in the next loss."""

DRAWN = (
    "SELECT step, position, experience_id, weight, lag, advantage, digest "
    "FROM draws_current ORDER BY step, position"
)
LOSSES = "SELECT step, value FROM metrics_current WHERE name = 'train/loss' ORDER BY step"
WEIGHTS = "SELECT policy_version, digest FROM policies_current ORDER BY policy_version"


def even_digits(task: rlake.Task, experience: rlake.Experience) -> float:
    """A reward that random weights earn a part of: the share of even digits."""
    return sum(c in "02468" for c in experience.response_text or "") / 3


async def until_the_last_batch(task: rlake.Task, policy: Policy) -> rlake.Experience:
    """Answer; in batches after `LAST_BATCH` of the environment, wait for what never comes."""
    run_id, batch = getattr(policy, "rollout", "").split("/")[:2]
    if run_id == "small" and int(batch) > int(os.environ.get("LAST_BATCH", batch)):
        await asyncio.Event().wait()
    return await single_turn(task, policy)


def start(folder: Path, *args: str, last_batch: int | None = None) -> "subprocess.Popen[str]":
    """Start `rlake ARGS` in a process of its own; it finds this module's rewards.

    A run that is to be killed makes no batch after `last_batch`, so that it cannot end before.
    """
    held = {} if last_batch is None else {"LAST_BATCH": str(last_batch)}
    (folder / "small.yaml").write_text(CONFIG)
    return subprocess.Popen(
        [sys.executable, "-c", "from rlake.loop.cli import main; main()", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE), **held},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_here(folder: Path, *sets: str, resume: bool = False) -> None:
    """Run in this process what `start` would run in another, whose imports take longer than it."""
    folder.mkdir(exist_ok=True)
    (folder / "small.yaml").write_text(CONFIG)
    run(rlake.connect(folder / "lake"), load(folder / "small.yaml", sets), resume=resume)


def flags(sets: Sequence[str]) -> list[str]:
    """Return settings as arguments of the command."""
    return [word for text in sets for word in ("--set", text)]


def finish(process: "subprocess.Popen[str]", *, seconds: float = 250) -> str:
    """Wait for a process that must succeed, and return what it printed."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return out


def kill_at(
    process: "subprocess.Popen[str]", store: Path, *, step: int, seconds: float = 250
) -> None:
    """Send SIGKILL as soon as the store shows that a step was drawn."""
    deadline = time.monotonic() + seconds
    lake: Store | None = None  # kept open: to open it at each look would take longer than a step
    while (lake := lake or opened(store)) is None or _newest(lake) < step:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, f"step {step} was not drawn in {seconds} s"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def drawn(store: Path) -> int:
    """Return the newest step that a store shows, 0 while there is none."""
    lake = opened(store)
    return 0 if lake is None else _newest(lake)


def opened(store: Path) -> Store | None:
    """Open a store; None while there is none."""
    try:
        return rlake.connect(store, create=False)
    except NotAStoreError:
        return None


def _newest(lake: Store) -> int:
    [(step,)] = lake.sql("SELECT coalesce(max(step), 0) FROM draws").fetchall()
    return step


def told(store: Path | Store) -> dict[str, list[tuple[object, ...]]]:
    """Return what two runs must agree on: the rows drawn, the losses, and the weights."""
    lake = store if isinstance(store, Store) else rlake.connect(store, create=False)
    queries: Sequence[tuple[str, str]] = [
        ("drawn", DRAWN),
        ("losses", LOSSES),
        ("weights", WEIGHTS),
    ]
    return {name: lake.sql(query).fetchall() for name, query in queries}
