"""Figures of whole training steps, and of what the store takes of them."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from time import perf_counter
from typing import Any

from rlake.store import Store, connect
from rlake.store.replay import Sampler
from rlake.store.replay.row_index import Index

from .figure import Bench, Figure, of

STEP = "32 prompts x 8 completions x 8 tokens, recipe grpo_arithmetic"


def step(bench: Bench) -> Iterator[Figure]:
    """Time a GRPO step, and the store's part of it in both jobs."""
    from rlake.loop.config import load
    from rlake.loop.run import run

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
    from rlake.loop.trainer import batch_rows
    from rlake.loop.weight_sync import WeightSubscriber

    spent: list[tuple[str, float, float]] = []
    inside = threading.local()
    calls: list[tuple[Any, str]] = [
        (Store, "append"),
        (Store, "sql"),
        (Sampler, "supply"),
        (Sampler, "draw"),
        (Sampler, "read"),
        (Index, "refresh"),
        (WeightSubscriber, "find"),
        (batch_rows, "row_digests"),
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
