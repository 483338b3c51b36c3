"""Figures of the memory and time of a training step, with and without what saves them."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from .figure import Bench, Figure

SIZES = {"4 x 256": (4, 256), "8 x 512": (8, 512), "12 x 768": (12, 768)}
"""Layers and width of models."""
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "padded": {"packing": False},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "bfloat16": {"precision": "bfloat16"},
    "offload": {"offload": {"optimizer": True, "activations": True}},
    "adafactor": {"optimizer": "adafactor"},
    "lora": {"lora": {"rank": 16}},
    "lora, gradient_checkpointing": {"gradient_checkpointing": True, "lora": {"rank": 16}},
    "compile": {"compile": True},
}
"""Keys of the trainer, and `lora` of the model."""
MIB = 2**20
TOKENS = 1024


def memory(bench: Bench) -> Iterator[Figure]:
    """Measure each size, with its estimate, and each case on the middle size."""
    del bench
    for label, (layers, width) in SIZES.items():
        for length in (128, 512):
            found = measured({"layers": layers, "width": width, "length": length})
            workload = f"{label}, rows of up to {length} tokens; estimated {found['estimated']}"
            yield Figure("memory_peak", found["peak"], "MiB", None, workload)
    for name, case in CASES.items():
        found = measured({"layers": 8, "width": 512, "length": 256, **case})
        workload = f"{name}: 8 x 512, rows of up to 256 tokens"
        yield Figure("memory_peak", found["peak"], "MiB", None, workload)
        yield Figure("memory_step", found["milliseconds"], "ms", None, workload)


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Take steps in a process of its own, whose peak is of nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.memory", json.dumps(case)],
        cwd=Path(__file__).parents[1],
        # Or glibc keeps freed blocks of up to 32 MiB, and the peak is of tensors long gone too.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(case: dict[str, Any]) -> None:
    """Take two steps; print the peak over the state before the networks were built."""
    import peft  # noqa: F401 - what it takes is not the step's
    import torch

    from rlake.loop.algorithms import resolve
    from rlake.loop.config import RunConfig, build
    from rlake.loop.trainer import networks
    from rlake.loop.trainer.memory import estimate
    from rlake.loop.trainer.step import Updater

    torch.set_num_threads(1)
    layers, width, length = (case.pop(key) for key in ("layers", "width", "length"))
    tiny = {"layers": layers, "hidden_size": width, "heads": width // 64}
    config: RunConfig = build(
        {
            "name": "memory",
            "model": {"from_scratch": tiny, "lora": case.pop("lora", None)},
            "algorithm": "sft",
            "trainer": {"micro_batch_tokens": 7 * TOKENS // 8, "max_logits_bytes": 2**24, **case},
        }
    )
    algorithm, rows = resolve(config.algorithm), examples_of(length)
    found = estimate(config, algorithm)
    before = resident()
    made, _ = networks.build(config, algorithm)
    updater = Updater(made, algorithm, config.trainer, total_steps=9, pad_id=0)
    updater.step(rows)
    began = perf_counter()
    updater.step(rows)
    ended = perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    message = {
        "peak": round(peak / MIB),
        "estimated": round(found.needed("cpu") / MIB),
        "milliseconds": round(1000 * (ended - began)),
    }
    print(json.dumps(message))


def examples_of(length: int) -> Any:
    """Rows of a step, half of them of three quarters of the length."""
    import numpy as np
    import polars as pl

    from rlake.loop.losses.batch import examples

    rng = np.random.default_rng(0)
    lengths = [length if i % 2 else 3 * length // 4 for i in range(TOKENS // length)]
    columns = {
        "experience_id": [f"e{i}" for i in range(len(lengths))],
        "token_ids": [rng.integers(3, 90, n).tolist() for n in lengths],
        "loss_mask": [[False, *[True] * (n - 1)] for n in lengths],
        "logprobs": [[-1.0] * n for n in lengths],
        "advantage": [1.0] * len(lengths),
        "reward": [1.0] * len(lengths),
        "weight": [1.0] * len(lengths),
        "lag": [0] * len(lengths),
        "is_expert": [True] * len(lengths),
        "temperature": [1.0] * len(lengths),
        "group": list(range(len(lengths))),
    }
    return examples(pl.DataFrame(columns))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
