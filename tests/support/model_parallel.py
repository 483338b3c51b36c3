"""What processes that divide models do in tests: `torchrun ... model_parallel.py FOLDER`."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.tiny_models import tiny
from support.updates import rows_of_a_step
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlake.loop.algorithms import resolve
from rlake.loop.config import KeepConfig, LoraConfig, TrainerConfig
from rlake.loop.losses.batch import Examples
from rlake.loop.models.lora import add_adapter
from rlake.loop.models.routers import prepared
from rlake.loop.trainer.checkpoints import Checkpoints
from rlake.loop.trainer.distributed.fsdp import gathered, shard
from rlake.loop.trainer.distributed.join import Terms, joined_torchrun
from rlake.loop.trainer.distributed.world import MultiProcess, SingleProcess
from rlake.loop.trainer.networks import Networks
from rlake.loop.trainer.step import Updater

PROCESSES = 4


def qwen3() -> PreTrainedModel:
    """A model whose embeddings are its head, and whose vocabulary two processes can divide."""
    return tiny(alphabet="0123456789+=x", layers=2, heads=4)[0]


def qwen2() -> PreTrainedModel:
    """A model with biases, two key-value heads, its own head, and an odd vocabulary."""
    config = Qwen2Config(
        vocab_size=15,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Qwen2ForCausalLM(config)
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):  # they would start at 0
                torch.nn.init.normal_(parameter, std=0.3)
        return made


def qwen3_moe() -> PreTrainedModel:
    """A model with four experts in each layer, two for a token."""
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config)


@dataclass(frozen=True)
class Case:
    """A model, and how processes divide it."""

    model: Callable[[], PreTrainedModel]
    world: Mapping[str, Any] = field(default_factory=dict)
    adapter: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)
    replays: bool = False
    """Whether the rows have experts, which all networks replay."""

    @property
    def rows(self) -> Examples:
        """The rows of each step."""
        rows = rows_of_a_step()
        if not self.replays:
            return rows
        generator = torch.Generator().manual_seed(0)
        order_NLE = torch.rand(int(rows.lengths.sum()), 2, 4, generator=generator).argsort(-1)
        return rows.with_tokens(routed_experts=order_NLE[..., :2].flatten(1).int())

    def updater(self, world: SingleProcess) -> tuple[Updater, Networks]:
        """GRPO with penalties on the entropy, and on the divergence from another model."""
        algorithm = resolve({"grpo": {"kl": {"coef": 0.1}, "entropy_coef": 0.01}})
        networks = Networks(self.model(), packing=True)
        if self.adapter:
            add_adapter(networks.policy, LoraConfig(rank=4), seed=0)
        else:
            networks.reference = self.model().requires_grad_(requires_grad=False)
        if self.replays:
            networks.routing = prepared(networks.policy)
            networks.routing.is_replay = True
        if isinstance(world, MultiProcess):
            shard(networks, world, needs=algorithm.needs)
        given: Any = {"learning_rate": 1e-2, "micro_batch_tokens": 40, **self.trainer}
        settings = TrainerConfig(**given)
        made = Updater(
            networks, algorithm, settings, total_steps=9, temperature=0.9, pad_id=0, world=world
        )
        return made, networks


CASES = {
    "tensor": Case(qwen3, {"tensor": 2}),
    "tensor of all": Case(qwen3, {"tensor": 4}),
    "replicated": Case(qwen3, {"tensor": 2, "shard": 1}),
    "an adapter": Case(qwen3, {"tensor": 2}, adapter=True),
    "biases": Case(qwen2, {"tensor": 2}, trainer={"gradient_checkpointing": True}),
    "experts": Case(qwen3_moe, {"experts": 4}),
    "experts, sharded": Case(qwen3_moe, {"experts": 2}, trainer={"max_grad_norm": 0.5}),
    "experts and tensor": Case(qwen3_moe, {"experts": 2, "tensor": 2}),
    "context": Case(qwen3, {"context": 4}),
    "context and tensor": Case(
        qwen3, {"context": 2, "tensor": 2}, trainer={"gradient_checkpointing": True}
    ),
    "context and data": Case(qwen2, {"context": 2, "shard": 2}),
    "context and experts": Case(qwen3_moe, {"context": 2, "experts": 4}),
    "replay, experts and tensor": Case(
        qwen3_moe, {"experts": 2, "tensor": 2}, trainer={"router_aux_loss_coef": 0.5}, replays=True
    ),
    "replay, context and experts": Case(
        qwen3_moe, {"context": 2, "experts": 4}, trainer={"router_aux_loss_coef": 0.5}, replays=True
    ),
}
"""Ways to divide a model; each has the step of one process."""

RESUMED = ("tensor", "experts and tensor", "context and tensor")
"""Cases that are resumed too."""


def steps_of(name: str) -> int:
    """How many steps a case takes."""
    return 3 if name in RESUMED else 2


def trained(
    world: SingleProcess,
    case: Case,
    steps: int,
    *,
    read: Path | None = None,
    write: Path | None = None,
) -> dict[str, Any]:
    """The weights and metrics after some steps, from a checkpoint or to one of step 2."""
    made, networks = case.updater(world)
    if read is not None:
        checkpoints = Checkpoints(read, keep=KeepConfig(), world=world)
        made.load(checkpoints.read(2, like=made.like)[0])
    measured = [made.step(case.rows).metrics for _ in range(steps)]
    if write is not None:
        checkpoints = Checkpoints(write, keep=KeepConfig(), world=world)
        checkpoints.write(2, state=made.state(), facts={})
        checkpoints.wait()
    return {"weights": gathered(networks.policy), "metrics": measured}


def main(folder: Path) -> None:
    """Train each case, go on from what one process saved, and save for it."""
    torch.set_num_threads(1)
    world = joined_torchrun(Terms(PROCESSES, None, "cpu", seconds=250.0, idle_seconds=250.0))
    told: dict[str, Any] = {}
    for name, case in CASES.items():
        given: dict[str, Any] = {"shard": None, "seconds": 250.0, "idle_seconds": 250.0}
        divided = MultiProcess(world.store, **{**given, **case.world})
        told[name] = trained(divided, case, steps_of(name))
        if name in RESUMED:
            many, one = folder / f"many {name}", folder / f"one {name}"
            trained(divided, case, 2, write=many)
            told[f"{name}, resumed"] = trained(divided, case, 1, read=many)
            told[f"{name}, from one"] = trained(divided, case, 1, read=one)
    if world.rank == 0:
        torch.save(told, folder / "told.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
