"""Divide the matrices of networks over processes, by the plans that transformers has for them.

Parameters that a plan leaves out are whole in each process, but `DTensor`s of the same mesh, so
that optimizers and the norm of gradients see one kind of parameter.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import (
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)

from ...models.load import vocabulary

# It warns of each gathering of a matrix that is divided twice that it takes two calls.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

PARTIAL = "replicated_with_grad_allreduce"
"""The style of layers, such as norms of heads, whose gradients processes must add up."""


def divide(root: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the parameters of a module over a mesh of one dimension, and its computation."""
    # Not `from_pretrained(tp_plan="auto")`: it makes a mesh of all processes, without one for rows,
    # and models from scratch or with an adapter do not come from it.
    partial: set[nn.Module] = set()
    tied: dict[int, Any] = {}
    before = [(m, name, id(p)) for m in root.modules() for name, p in _own(m).items()]
    for model in models_within(root):
        plan = plan_of(model, mesh.size())
        partial |= {m for name, m in model.named_modules() if plan.get(wild(name)) == PARTIAL}
        # The hook of that style adds up a gradient again at each backward pass that accumulates.
        apply_tensor_parallelism(
            model, mesh, {name: style for name, style in plan.items() if style != PARTIAL}
        )
    for module in root.modules():
        grad = Partial() if module in partial else Replicate()
        _replicate(module, mesh, grad)
    for module, name, identity in before:
        # tied parameters were divided one by one, in the same way
        parameter = _own(module)[name]
        if parameter is not None:
            _own(module)[name] = tied.setdefault(identity, parameter)


def plan_of(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Return the style in which each layer of a model is divided, by its name with wildcards.

    Embeddings and head are whole in each process where `size` does not divide the vocabulary.
    Experts are left out: they are divided by the plan of their own.
    """
    experts = tuple(model.ep_plan)
    plan = {
        name: style
        for name, style in model.tp_plan.items()
        if name not in experts and not name.startswith(tuple(f"{one}." for one in experts))
    }
    names = {module: name for name, module in model.named_modules()}
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if vocabulary(model) % size:
        whole = {names[embeddings], names.get(head)}
        plan = {name: style for name, style in plan.items() if name not in whole}
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and (style := plan.pop(wild(name), None)) is not None:
            # the matrix of the adapter that has the divided side of the layer's own
            matrix = "lora_B.default" if style == "colwise" else "lora_A.default"
            styles |= {f"{wild(name)}.{part}": style for part in ("base_layer", matrix)}
    return plan | styles


def divided(model: PreTrainedModel, size: int) -> frozenset[str]:
    """Return the names of the parameters that are divided, experts too."""
    plan = {name for name, style in plan_of(model, size).items() if style != PARTIAL}
    plan |= set(model.ep_plan)
    return frozenset(
        name
        for name, _ in model.named_parameters()
        if wild(name) in plan or wild(name.rpartition(".")[0]) in plan
    )


def narrowed(config: PreTrainedConfig, size: int) -> PreTrainedConfig:
    """Return the configuration of a model whose layers are as wide as in one of `size` processes.

    It has the hidden states of the whole, so the model is good for the sizes of its tensors only.
    """
    made = deepcopy(config)
    text: Any = made.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (width := getattr(text, name, None)) is not None:
            setattr(text, name, width // size)
    return made


def models_within(root: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the outermost models of transformers within a module."""
    if isinstance(root, PreTrainedModel):
        yield root
        return
    for child in root.children():
        yield from models_within(child)


def wild(name: str) -> str:
    """Return the name of a layer as plans have it, with * for numbers."""
    return replace_layer_number_by_wildcard(name)


def _replicate(module: nn.Module, mesh: DeviceMesh, grad: Placement) -> None:
    """Make a layer's plain parameters `DTensor`s that every process has whole."""
    plain = [n for n, p in _own(module).items() if p is not None and not _is_divided(p)]
    for name in plain:
        parameter: Any = _own(module)[name]
        made = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        _own(module)[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    if plain:
        forward = module.forward

        def locally(*args: Any, **options: Any) -> Any:
            with _local(module, plain, grad):
                return forward(*args, **options)

        module.forward = locally


def _own(module: Any) -> dict[str, Any]:
    """Return a layer's own parameters by name; what is set there is not made a parameter."""
    return module._parameters


def _is_divided(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor)


@contextmanager
def _local(module: nn.Module, names: Iterable[str], grad: Placement) -> Iterator[None]:
    """Give a layer plain parameters; their gradients are whole, or parts of a sum (`grad`)."""
    own: dict[str, Any] = {name: _own(module)[name] for name in names}
    _own(module).update(
        {name: parameter.to_local(grad_placements=[grad]) for name, parameter in own.items()}
    )
    try:
        yield
    finally:
        _own(module).update(own)
