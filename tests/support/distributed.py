"""What several processes do in tests: `torchrun ... parallel.py FOLDER`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.tiny_models import offline, tiny, written
from support.updates import Step, rows_of_a_step, step

import rlake
from rlake.loop.algorithms import names, resolve
from rlake.loop.algorithms.sft import SFT
from rlake.loop.config import KeepConfig, LoraConfig, OffloadConfig, RunConfig, TrainerConfig
from rlake.loop.losses import Loss
from rlake.loop.losses.batch import Batch
from rlake.loop.models.lora import add_adapter
from rlake.loop.trainer.checkpoints import Checkpoints
from rlake.loop.trainer.distributed.fsdp import gathered, shard
from rlake.loop.trainer.distributed.join import Terms, joined_torchrun
from rlake.loop.trainer.distributed.world import MultiProcess, SingleProcess
from rlake.loop.trainer.networks import Networks
from rlake.loop.trainer.step import StepResult, Updater
from rlake.store import Store

BUDGET = 40
"""Cuts the rows into micro-batches of which one process has more than the other."""


@dataclass(frozen=True, kw_only=True)
class FailsInTheSecond(SFT):
    """An algorithm that fails in the second process only."""

    def loss(self, batch: Batch, logprobs_BT: torch.Tensor) -> Loss:
        if dist.is_initialized() and dist.get_rank() == 1 and batch.step == 2:
            raise ValueError("two is one too many")
        return super().loss(batch, logprobs_BT)


def cases() -> list[Any]:
    """Every packaged algorithm, and one of them with penalties that need more columns."""
    return [*names(), {"grpo": {"kl": {"coef": 0.1}, "entropy_coef": 0.01}}]


def optimization(
    world: SingleProcess, *, adapter: bool = False, on_cpu: bool = False
) -> tuple[Updater, Networks]:
    """GRPO with a penalty on the divergence from what it started from."""
    algorithm = resolve({"grpo": {"kl": {"coef": 0.1}}})
    networks = Networks(tiny()[0])
    if adapter:
        add_adapter(networks.policy, LoraConfig(rank=4), seed=0)
    else:
        networks.reference = tiny(seed=1)[0].requires_grad_(requires_grad=False)
    if isinstance(world, MultiProcess):
        shard(networks, world, needs=algorithm.needs, on_cpu=on_cpu)
    offload = OffloadConfig(parameters=on_cpu, activations=on_cpu)
    settings = TrainerConfig(learning_rate=1e-2, micro_batch_tokens=BUDGET, offload=offload)
    made = Updater(
        networks, algorithm, settings, total_steps=9, temperature=0.9, pad_id=0, world=world
    )
    return made, networks


def after(world: SingleProcess, steps: int, **options: bool) -> dict[str, torch.Tensor]:
    """The weights after some steps."""
    made, networks = optimization(world, **options)
    for _ in range(steps):
        made.step(rows_of_a_step())
    return gathered(networks.policy)


def saved(world: SingleProcess, folder: Path) -> None:
    """Take two steps, and write a checkpoint."""
    made, _ = optimization(world)
    for _ in range(2):
        made.step(rows_of_a_step())
    checkpoints = Checkpoints(folder, keep=KeepConfig(), world=world)
    checkpoints.write(2, state=made.state(), facts={})
    checkpoints.wait()


def continued(world: SingleProcess, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after a checkpoint and two steps more."""
    made, networks = optimization(world)
    checkpoints = Checkpoints(folder, keep=KeepConfig(), world=world)
    state, _ = checkpoints.read(2, like=made.like)
    made.load(state)
    for _ in range(2):
        made.step(rows_of_a_step())
    return gathered(networks.policy)


def faulty(world: SingleProcess) -> StepResult:
    """Take a step on rows of which one has no number where it needs one."""
    rows = rows_of_a_step()
    logprobs = rows.tokens["logprobs"].clone()
    logprobs[rows.starts[4] - 1] = float("nan")  # the last token of the fourth row
    return optimization(world)[0].step(rows.with_tokens(logprobs=logprobs))


def settings(algorithm: str = "sft", **parallel: Any) -> RunConfig:
    """A short offline run, on one process unless it says more."""
    trainer = {
        "max_uses": 4,
        "batch_size": 8,
        "checkpoint_every": 2,
        "micro_batch_tokens": 20,
        "distributed": {"timeout": 250, **parallel},
    }
    return offline(algorithm=algorithm, trainer=trainer)


def place(folder: Path) -> Store:
    """A store with rows to train on."""
    store = rlake.connect(folder)
    store.append("experiences", written(16))
    return store


def main(folder: Path) -> None:
    """Step with every algorithm; go on from what one process saved, and save for it."""
    torch.set_num_threads(1)
    world = joined_torchrun(Terms(2, None, "cpu", seconds=250.0, idle_seconds=250.0))
    taken: dict[str, Step] = {
        str(algorithm): step(algorithm, rows_of_a_step(), micro_batch_tokens=BUDGET, world=world)
        for algorithm in cases()
    }
    left_out = faulty(world)
    saved(world, folder / "two")
    repeated = MultiProcess(world.store, shard=1, seconds=250.0, idle_seconds=250.0)
    weights = {
        "from one": continued(world, folder / "one"),
        "with an adapter": after(world, 3, adapter=True),
        "repeated": after(repeated, 3),
        "offloaded": after(world, 3, on_cpu=True),
    }
    if world.rank == 0:
        told = {"steps": taken, "weights": weights, "faulty": left_out}
        torch.save(told, folder / "told.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
