"""Networks whose weights lie in parts on several processes, and how they become whole again.

Gradients are summed over processes: FSDP averages them, and the loss is multiplied with how many
there are (see `Optimization`).
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...models.token_logprobs import Scorer
from ..networks import Networks
from .world import MultiProcess


def shard(networks: Networks, processes: MultiProcess, *, needs: frozenset[str]) -> None:
    """Cut all networks into parts, layer by layer, so that each process holds one of each.

    A teacher whose whole distributions are compared (`vocabulary` of `needs`) stays whole: it is
    not asked as one module.
    """
    mesh = processes.mesh(networks.policy.device.type)
    beside = [
        scorer
        for name, scorer in networks.scorers.items()
        if isinstance(scorer, Scorer) and not (name == "teacher" and "vocabulary" in needs)
    ]
    critic = [] if networks.critic is None else [networks.critic]
    for root in [networks.scorer, *beside, *critic]:
        for layer in layers(root):
            fully_shard(layer, mesh=mesh)
        fully_shard(root, mesh=mesh)


def layers(root: nn.Module) -> list[nn.Module]:
    """Return the layers of the language models within a module."""
    names = {name for module in root.modules() for name in _whole(module)}
    return [module for module in root.modules() if type(module).__name__ in names]


def _whole(module: nn.Module) -> Iterable[str]:
    """Return what transformers says must not be divided: the classes of layers."""
    named = (
        getattr(module, "_no_split_modules", None) if isinstance(module, PreTrainedModel) else ()
    )
    return named or ()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may lie in parts as one; all processes must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights of a model on the CPU of the first process, nothing on the others.

    All processes must ask.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(model, options=options)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
