"""Shard networks over several processes with FSDP2, and gather their full weights.

FSDP averages gradients over processes, but a step needs their sum, so `Updater` multiplies the loss
by the number of processes. Tensor and expert parallelism divide matrices and experts first, and
FSDP the parts.
"""

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ....store.errors import ConfigError
from ...models.context_parallel import Context
from ...models.token_logprobs import Scorer
from ..networks import Networks, layers
from .expert_parallel import divide_experts
from .tensor_parallel import divide
from .world import MultiProcess


def shard(
    networks: Networks, processes: MultiProcess, *, needs: frozenset[str], on_cpu: bool = False
) -> None:
    """Shard all networks layer by layer; `on_cpu` keeps the shards in CPU memory.

    A teacher whose whole distributions are compared (`vocabulary` in `needs`) stays unsharded:
    its decoder and head are called one by one, which bypasses the hooks of the root module.
    """
    device = networks.device.type  # read before the parameters are moved
    mesh = processes.mesh(device)
    names = ("shard",) if mesh["replicate"].size() == 1 else ("replicate", "shard")
    sharing = mesh[names]
    policy = CPUOffloadPolicy(pin_memory=device == "cuda") if on_cpu else OffloadPolicy()
    others = [
        scorer
        for name, scorer in networks.scorers.items()
        if isinstance(scorer, Scorer) and not (name == "teacher" and "vocabulary" in needs)
    ]
    if processes.context > 1:
        context = Context(processes.context_group(device))
        for scorer in [networks.scorer, *others]:
            _check_packs(scorer)
            scorer.context = context
    critic = [] if networks.critic is None else [networks.critic]
    for root in [networks.scorer, *others, *critic]:
        if processes.experts > 1:
            own = processes.experts_mesh(device)
            for experts in divide_experts(root, own["experts"], mesh["tensor"]):
                made = fully_shard(experts, mesh=own["shard"], offload_policy=policy)
                assert isinstance(made, FSDPModule)
                # tokens of all processes came to the experts, more than shard these
                made.set_gradient_divide_factor(float(processes.averaged))
                # gloo can only add up; without others to add, torch 2.13 would divide twice
                made.set_force_sum_reduction_for_comms(enable=own["shard"].size() > 1)
        if mesh["tensor"].size() > 1:
            divide(root, mesh["tensor"])
        # Layers first: the root then shards only the parameters that are left.
        for layer in layers(root):
            fully_shard(layer, mesh=sharing, offload_policy=policy)
        fully_shard(root, mesh=sharing, offload_policy=policy)


def _check_packs(scorer: nn.Module) -> None:
    if not isinstance(scorer, Scorer) or not scorer.packs:
        raise ConfigError(
            f"`{type(scorer.model).__name__}` does not support packed sequences, which "
            "`trainer.distributed.context_parallel` divides; set that to 1"
        )


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor unsharded; a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights of a model on rank 0's CPU, nothing on other ranks; a collective call."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(model, options=options)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
