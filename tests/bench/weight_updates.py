"""Figures of new weights for a running vLLM: by a folder, through memory, and as an adapter.

Each figure is what an update takes from the trainer's model to the next token that may be sampled:
a copy or a folder is made of the weights, and vLLM's workers load them. The kinds go by turns. CPU
time is that of this process and vLLM's together.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .figure import Bench, Figure, say

if TYPE_CHECKING:
    from rlake.loop.inference import Weights

SPEC: dict[str, Any] = {"hidden_size": 512, "layers": 6, "heads": 8, "init_std": 0.02}
RANK = 16
TURNS = 6
"""Updates of each kind after the first, which warms up."""
WORK = "Qwen3 of 6 layers of 512, float32, {size} MB; vLLM on a CPU; median of {turns}"


def weight_updates(bench: Bench) -> Iterator[Figure]:
    """Measure updates of a whole model and of its adapter, verified and not."""
    if find_spec("vllm") is None:
        say("weight_updates needs vllm")
        return
    from rlake.loop.config import LoraConfig
    from rlake.loop.config.model import TinyModel
    from rlake.loop.models.adapter_files import write_settings
    from rlake.loop.models.load import make_tiny
    from rlake.loop.models.lora import add_adapter
    from rlake.loop.models.state_dict import copied, state_of

    model, tokenizer = make_tiny(TinyModel(**SPEC), seed=0)
    state, first = copied(model), bench.folder / "first"
    first.mkdir()
    model.config.save_pretrained(first)
    tokenizer.save_pretrained(first)
    save(state, first / "model.safetensors")
    kinds = {
        "folder_unverified": lambda i: by_folder(state_of(model), first, i),
        "folder": lambda i: by_folder(state_of(model), first, i),
        "memory_unverified": lambda i: in_memory(copied(model), i),
        "memory": lambda i: in_memory(copied(model), i),
    }
    yield from measured(first, kinds, prefix="weights_by", size=megabytes(state))

    add_adapter(model, LoraConfig(rank=RANK), seed=0)
    adapter = bench.folder / "run" / "policies" / "v000000"
    adapter.mkdir(parents=True)
    write_settings(model, adapter, run_folder=bench.folder / "run", tokenizer=tokenizer)
    tokenizer.save_pretrained(adapter)
    save(state_of(model), adapter / "adapter_model.safetensors")
    kinds = {
        "memory_unverified": lambda i: in_memory(copied(model), i),
        "memory": lambda i: in_memory(copied(model), i),
    }
    size = megabytes(state_of(model))
    yield from measured(adapter, kinds, prefix="adapter_by", size=size)


def measured(
    folder: Path, kinds: dict[str, Callable[[int], "Weights"]], *, prefix: str, size: float
) -> Iterator[Figure]:
    """Yield the wall time and the CPU time of each kind of update of one engine."""
    from rlake.loop.config.engines import VllmEngine as Settings
    from rlake.loop.inference.vllm_engine.engine import VllmEngine

    # Every second update is verified, in the order of the kinds.
    engine = VllmEngine(folder, Settings(verify_weights=0.5))
    wall: dict[str, list[float]] = {kind: [] for kind in kinds}
    used: dict[str, list[float]] = {kind: [] for kind in kinds}

    async def update() -> None:
        for i in range(len(kinds) * (TURNS + 1)):
            kind = list(kinds)[i % len(kinds)]
            began, cpu = perf_counter(), cpu_seconds()
            await engine.swap(kinds[kind](i))
            if i >= len(kinds):
                wall[kind].append(1000 * (perf_counter() - began))
                used[kind].append(1000 * (cpu_seconds() - cpu))
        await engine.close()

    asyncio.run(update())
    workload = WORK.format(size=round(size, 1), turns=TURNS)
    for kind in kinds:
        say(f"{prefix}_{kind}: {[round(ms) for ms in wall[kind]]} ms")
        for name, found in (("", wall[kind]), ("_cpu", used[kind])):
            value, least = round(median(found), 1), round(min(found), 1)
            yield Figure(f"{prefix}_{kind}{name}", value, "ms", None, workload, least)


def in_memory(state: Any, version: int) -> "Weights":
    """Return a version in memory."""
    from rlake.loop.inference import Weights
    from rlake.loop.models.state_dict import weights_digest

    return Weights(version=version, digest=weights_digest(state), state=state)


def by_folder(state: Any, first: Path, version: int) -> "Weights":
    """Return a version in a folder, as a trainer publishes it."""
    from rlake.loop.inference import Weights
    from rlake.loop.models.atomic_folder import write_folder
    from rlake.loop.models.state_dict import weights_digest

    folder = first.with_name(f"v{version:06d}")
    files: dict[str, Callable[[Path], object]] = {
        path.name: lambda target, path=path: os.link(path, target)
        for path in first.iterdir()
        if path.suffix != ".safetensors"
    }
    write_folder(folder, files | {"model.safetensors": lambda path: save(state, path)})
    return Weights(version=version, digest=weights_digest(state), folder=folder)


def save(state: Any, path: Path) -> None:
    """Write tensors to a file."""
    from safetensors.torch import save_file

    whole = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(whole, path, metadata={"format": "pt"})


def megabytes(state: Any) -> float:
    """Return the size of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values()) / 1e6


def cpu_seconds() -> float:
    """Return the CPU time so far of this process and of those below it."""
    import psutil

    this = psutil.Process()
    times = [one.cpu_times() for one in (this, *this.children(recursive=True))]
    return sum(time.user + time.system for time in times)
