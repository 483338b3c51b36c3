"""Divide the experts of networks over processes, by the plans that transformers has for them."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import apply_expert_parallelism

from .tensor_parallel import models_within, wild

DISPATCHES = "ep_dispatch_experts"
"""The style of experts to which the tokens of all processes of a group travel."""


def divide_experts(root: nn.Module, experts: DeviceMesh, tensor: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of a module over a mesh, and return the layers that have them.

    Processes of `tensor` have the same tokens, of which each sends a part to the experts.
    """
    found: list[nn.Module] = []
    for model in models_within(root):
        plan = dict(model.ep_plan)
        apply_expert_parallelism(model, experts, tensor, plan)
        found += [m for name, m in model.named_modules() if plan.get(wild(name)) == DISPATCHES]
    return found
