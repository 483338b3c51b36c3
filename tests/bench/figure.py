"""What a figure is, and the large store that most of them are measured on."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from rlake.store import Store, connect
from rlake.store.errors import JobError

T = TypeVar("T")
ROWS_AT_ONCE = 8192
"""Rows of one commit of the large table: about 25 MB."""
PAYLOAD = ["token_ids", "logprobs", "loss_mask", "reward"]
"""What a training step reads of a row."""


@dataclass(frozen=True)
class Figure:
    """One number, and what it is allowed to be."""

    figure: str
    value: float
    unit: str
    budget: float | None
    workload: str
    minimum: float | None = None
    """The best of the repetitions: nearer to the truth on a machine that does other work too."""


@dataclass
class Bench:
    """What the figures are measured on; the large store is made when one asks for it."""

    folder: Path
    rows: int

    @cached_property
    def large(self) -> Store:
        """A store of `rows` experiences of 256-512 tokens, ten policy versions old at most."""
        store = connect(self.folder / "large")
        rng = np.random.default_rng(0)
        for start in range(0, self.rows, ROWS_AT_ONCE):
            n = min(ROWS_AT_ONCE, self.rows - start)
            store.append("experiences", rows(rng, n, first=start, versions=10, of=self.rows))
            say(f"large store: {start + n} of {self.rows} rows")
        return store


def say(text: str) -> None:
    """Show progress where it does not mix with the figures."""
    print(text, file=sys.stderr, flush=True)


def timed(work: Callable[[int], object], *, times: int, warm_up: int = 3) -> list[float]:
    """Return the milliseconds of each call after the first few."""
    taken = []
    for i in range(warm_up + times):
        began = perf_counter()
        work(i)
        taken.append(1000 * (perf_counter() - began))
    return taken[warm_up:]


def of(taken: list[float], figure: str, budget: float | None, workload: str) -> Figure:
    """Make a figure of repeated measurements in milliseconds."""
    workload = f"{workload}; median of {len(taken)}"
    return Figure(figure, round(median(taken), 3), "ms", budget, workload, round(min(taken), 3))


def once(work: Callable[[], T]) -> tuple[T, float]:
    """Return what a call returns, and its seconds."""
    began = perf_counter()
    return work(), perf_counter() - began


def told(program: Sequence[str], what: str, **options: Any) -> Any:
    """Return the last line, as JSON, that a Python program prints in a process of its own.

    A fresh process has its own peak of memory, and loads nothing before it.
    """
    command = [sys.executable, "-W", "ignore", "-c", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise JobError(f"{what} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def identity(first: int, n: int) -> dict[str, Any]:
    """Return the columns that say what n rows in groups of 8 are, 32 groups a batch."""
    place = np.arange(first, first + n)
    group = np.char.mod("bench/%06d", place // 256)
    group = np.char.add(group, np.char.mod("/%04d", place % 256 // 8))
    return {
        "experience_id": np.char.add(group, np.char.mod("/%02d", place % 8)),
        "group_id": group,
        "task_id": np.char.mod("task-%d", place // 8 % 5000),
        "run_id": np.full(n, "bench"),
        "rollout_index": place % 8,
        "batch": place // 256 + 1,
        "source": np.full(n, "explorer"),
    }


def tokens(lengths: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, mask: Any) -> dict[str, Any]:
    """Return the columns of tokens of rows with these lengths."""
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    columns = {"token_ids": ids.astype(np.int32), "logprobs": logprobs, "loss_mask": mask}
    lists = {k: pa.ListArray.from_arrays(offsets, pa.array(v)) for k, v in columns.items()}
    return {**lists, "num_tokens": lengths}


def rows(rng: np.random.Generator, n: int, *, first: int, versions: int, of: int) -> pa.Table:
    """Make n rows of 256-512 tokens in groups of 8; policy versions rise over `of` rows."""
    lengths, place = rng.integers(256, 513, n), np.arange(first, first + n)
    total = int(lengths.sum())
    ids, logprobs = rng.integers(0, 50_000, total), -rng.random(total, np.float32)
    return pa.table(
        {
            **identity(first, n),
            "policy_version": place * versions // of,
            **tokens(lengths, ids, logprobs, rng.random(total) < 0.8),
            "reward": np.where(rng.random(n) < 0.4, 1.0, 0.0),
            "prompt_text": ["What is the sum of these two numbers?"] * n,
            "response_text": [f"the answer is {p}" for p in place],
        }
    )
