"""The budgets, measured: `python -m rlake.loop.bench [FIGURE ...]` prints a JSON object a line."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, wraps
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa

from ..store import Experience, Store, connect
from ..store.index import Index
from ..store.sampling import Freshness, Sampler, Uniform

ROWS_AT_ONCE = 8192
"""Rows of one commit of the large table: about 25 MB."""
STEP = "32 prompts x 8 completions x 8 tokens, recipe grpo_arithmetic"
PAYLOAD = ["token_ids", "logprobs", "loss_mask", "reward"]


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the figures that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m rlake.loop.bench", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the large store")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.figures) - set(FIGURES))
    if unknown:
        parser.error(f"there is no figure `{unknown[0]}`; known are {', '.join(FIGURES)}")
    with tempfile.TemporaryDirectory(prefix="rlake-bench-") as folder:
        bench = Bench(Path(folder), chosen.rows)
        for name in chosen.figures or FIGURES:
            say(f"measuring {name}")
            for figure in FIGURES[name](bench):
                print(json.dumps(asdict(figure)), flush=True)


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


def append(bench: Bench) -> Iterator[Figure]:
    """Append batches of 256, as Arrow rows and as the records that the explorer appends."""
    what = "256 experiences of 256-512 tokens, into one store"
    rng = np.random.default_rng(1)
    batches = [rows(rng, 256, first=256 * i, versions=10, of=256 * 80) for i in range(80)]
    records = [[Experience.from_row(r) for r in b.to_pylist()] for b in batches[40:]]
    store = connect(bench.folder / "append")
    taken = timed(lambda i: store.append("experiences", batches[i]), times=37)
    yield of(taken, "append", 10.0, f"{what}, as an Arrow table")
    taken = timed(lambda i: store.append("experiences", records[i]), times=37)
    yield of(taken, "append_records", None, f"{what}, as Python records")


def draw(bench: Bench) -> Iterator[Figure]:
    """Draw 256 rows: look what is fresh, choose, and read the payload."""
    size = f"256 fresh of {bench.rows} rows of 256-512 tokens"
    sampler = Sampler(
        bench.large, strategy=Uniform(), freshness=Freshness(4), max_draws=None, seed=0
    )
    began = perf_counter()
    sampler.supply(256, 9)
    first = 1000 * (perf_counter() - began)
    workload = f"the first look at {bench.rows} rows; later ones read what is new"
    yield Figure("index", round(first, 3), "ms", None, workload)

    def one(step: int) -> None:
        drawn = sampler.draw(256, step=step, policy_version=9)
        assert drawn is not None, "there are fresh rows"
        assert sampler.read(drawn, PAYLOAD).height == 256

    yield of(timed(one, times=40, warm_up=5), "draw", 25.0, f"{size}, uniform, payload read")
    choose = timed(lambda i: sampler.draw(256, step=i, policy_version=9), times=40)
    yield of(choose, "draw_choose", None, f"{size}, uniform, without the payload")


def groups(bench: Bench) -> Iterator[Figure]:
    """Mean, deviation and pass rate of each group in SQL."""
    query = "SELECT group_id, reward_mean, reward_std, pass_rate FROM groups"
    taken = timed(lambda _: bench.large.sql(query).to_arrow_table(), times=20)
    yield of(taken, "groups", 20.0, f"view `groups` over {bench.rows} rows, with the query's start")


def tokens(bench: Bench) -> Iterator[Figure]:
    """Sum over every stored token's log-prob."""
    query = "SELECT sum(list_sum(logprobs)), sum(num_tokens) FROM experiences"
    [(_, total)] = bench.large.sql(query).fetchall()
    taken = timed(lambda _: bench.large.sql(query).fetchall(), times=7, warm_up=1)
    yield of(taken, "tokens", 500.0, f"sum of the log-probs of {total} stored tokens")


def step(bench: Bench) -> Iterator[Figure]:
    """Time a GRPO step, and the store's part of it in both jobs."""
    from .config import load
    from .run import run

    overrides = ["trainer.steps=60", "trainer.checkpoint_every=1000"]
    config = load("grpo_arithmetic", [*overrides, "explorer.sampling.max_tokens=8"])
    ends: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)

    def listen(job: str, number: int, values: Any) -> None:
        if job == "train":
            ends.append(perf_counter())
            for name in ("train/step_seconds", "train/publish_seconds"):
                parts[name].append(1000 * values[name])
        if job == "explore":
            parts["explore/seconds"].append(1000 * values["explore/seconds"])
        del number

    with measured() as spent:
        run(connect(bench.folder / "step"), config, listener=listen)
    skip = 10  # the first ones warm up
    taken = [1000 * (b - a) for a, b in zip(ends[skip:], ends[skip + 1 :], strict=False)]
    yield of(taken, "step", 130.0, f"{STEP}; explorer, trainer, weights and all rows stored")
    for name, values in parts.items():
        yield of(values[skip:], f"step_{name.split('/')[1]}", None, f"{STEP}; the metric {name}")
    began, ended = ends[skip], ends[-1]
    inside = [(what, ms) for what, at, ms in spent if began <= at <= ended]
    total = sum(ms for _, ms in inside) / len(taken)
    workload = f"{STEP}; time in store calls of both jobs, mean of {len(taken)} steps: "
    calls = {what: sum(ms for w, ms in inside if w == what) / len(taken) for what, _ in inside}
    detail = ", ".join(f"{w} {ms:.1f} ms" for w, ms in sorted(calls.items(), key=lambda c: -c[1]))
    yield Figure("store_ms", round(total, 3), "ms", 15.0, workload + detail)
    share = 100 * total / (sum(taken) / len(taken))
    yield Figure("store_share", round(share, 2), "%", None, f"{STEP}; of the measured step")


@contextmanager
def measured() -> Iterator[list[tuple[str, float, float]]]:
    """Note (call, time, milliseconds) of every outermost call into the store, but not of waits."""
    from . import feed
    from .weights import Follower

    spent: list[tuple[str, float, float]] = []
    inside = threading.local()
    calls: list[tuple[Any, str]] = [
        (Store, "append"),
        (Store, "sql"),
        (Sampler, "supply"),
        (Sampler, "draw"),
        (Sampler, "read"),
        (Index, "refresh"),
        (Follower, "find"),
        (feed, "row_digests"),
    ]

    def wrap(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(call)
        def timed_call(*args: Any, **options: Any) -> Any:
            if getattr(inside, "call", None) is not None:
                return call(*args, **options)
            inside.call = name
            began = perf_counter()
            try:
                return call(*args, **options)
            finally:
                ended = perf_counter()
                inside.call = None
                # `append` to each table is a cost of its own
                what = f"{name} {args[1]}" if name == "append" else name
                spent.append((what, ended, 1000 * (ended - began)))

        return timed_call

    with ExitStack() as stack:
        for owner, name in calls:
            original = getattr(owner, name)
            setattr(owner, name, wrap(original, name))
            stack.callback(setattr, owner, name, original)
        yield spent


def imports(bench: Bench) -> Iterator[Figure]:
    """Import the package in fresh interpreters."""
    del bench
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}

    def once(statement: str) -> float:
        code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env=environment,
        )  # fmt: skip
        return 1000 * float(done.stdout)

    cases = (("import", "import rlake", 300.0), ("import_store", "import rlake.store", None))
    for name, statement, budget in cases:
        taken = [once(statement) for _ in range(6)][1:]
        yield of(taken, name, budget, f"`{statement}` in a fresh interpreter")


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "import": imports,
    "append": append,
    "draw": draw,
    "groups": groups,
    "tokens": tokens,
    "step": step,
}
"""What can be measured, by name."""

if __name__ == "__main__":
    main()
