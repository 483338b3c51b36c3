"""What a figure is, and the large store that most of them are measured on."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import pyarrow as pa

from rlake.store import Store, connect

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
    return Figure(
        figure, round(median(taken), 3), "ms", budget, workload, round(min(taken), 3)
    )  # fmt: skip


def rows(rng: np.random.Generator, n: int, *, first: int, versions: int, of: int) -> pa.Table:
    """Make n rows of 256-512 tokens in groups of 8; policy versions rise over `of` rows."""
    lengths = rng.integers(256, 513, n)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    total = int(lengths.sum())
    place = np.arange(first, first + n)

    def per_token(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values))

    group = [f"bench/{p // 256:06d}/{p % 256 // 8:04d}" for p in place]
    return pa.table(
        {
            "experience_id": [f"{g}/{p % 8:02d}" for g, p in zip(group, place, strict=True)],
            "group_id": group,
            "task_id": [f"task-{p // 8 % 5000}" for p in place],
            "run_id": ["bench"] * n,
            "rollout": place % 8,
            "step": place // 256 + 1,
            "source": ["explorer"] * n,
            "policy_version": place * versions // of,
            "token_ids": per_token(rng.integers(0, 50_000, total).astype(np.int32)),
            "logprobs": per_token(-rng.random(total, np.float32)),
            "loss_mask": per_token(rng.random(total) < 0.8),
            "num_tokens": lengths,
            "reward": np.where(rng.random(n) < 0.4, 1.0, 0.0),
            "prompt_text": ["What is the sum of these two numbers?"] * n,
            "response_text": [f"the answer is {p}" for p in place],
        }
    )
