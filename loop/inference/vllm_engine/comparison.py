"""Compare the weights that a model of vLLM multiplies with to those that it was given."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

COLUMNS = 32
"""Columns of a matrix that are compared; a wider one is sampled evenly. On CPUs reading one back
costs a multiplication, and one shows that the matrix is not the old one."""


@torch.inference_mode()
def differences(model: nn.Module, given: Mapping[str, Tensor]) -> tuple[int, list[str]]:
    """Compare a model's weights with those of a file, wherever vLLM put them.

    Returns how many were compared, and the names of those that differ. Weights that vLLM shards
    over several GPUs, or holds in another form, are not compared.
    """
    compared, differ = 0, []
    for name, tensor in given.items():
        path, _, leaf = name.rpartition(".")
        module, first = _module(model, path, leaf, given)
        columns = None
        if tensor.dim() == 2:
            width = tensor.shape[1]
            columns = torch.linspace(0, width - 1, min(width, COLUMNS)).round().long()
        held = None if module is None else _held(module, leaf, tensor, columns)
        if held is None:
            continue
        held = held[first : first + len(tensor)]
        want = tensor if columns is None else tensor[:, columns]
        if held.shape != want.shape:
            continue
        compared += 1
        if not torch.equal(held.cpu(), want.to(held.dtype)):
            differ.append(name)
    return compared, differ


def _module(
    model: nn.Module, path: str, leaf: str, given: Mapping[str, Tensor]
) -> tuple[nn.Module | None, int]:
    """Return the module that holds a tensor, and the tensor's first row there.

    vLLM packs matrices with the same input into one: query, key and value; gate and up.
    """
    modules = {
        # Around a layer that may have an adapter vLLM puts another one.
        name: getattr(module, "base_layer", module)
        for name, module in model.named_modules(remove_duplicate=False)
    }
    if path in modules:
        return modules[path], 0
    above, _, part = path.rpartition(".")
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for whole, parts in packed.items():
        module = modules.get(f"{above}.{whole}")
        if part in parts and module is not None:
            before = (given.get(f"{above}.{p}.{leaf}") for p in parts[: parts.index(part)])
            return module, sum(len(tensor) for tensor in before if tensor is not None)
    return None, 0


def _held(module: Any, leaf: str, tensor: Tensor, columns: Tensor | None) -> Tensor | None:
    """Return a module's parameter; of a matrix, some columns.

    On CPUs vLLM keeps only a packed form of a matrix, which is read back by multiplying unit
    vectors.
    """
    held = getattr(module, leaf, None)
    if not isinstance(held, Tensor):
        return None
    is_multiplied = type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear")
    if held.numel() and not is_multiplied:
        is_matrix = columns is not None and held.dim() == 2 and held.shape[1] == tensor.shape[1]
        return held[:, columns] if is_matrix else held
    width = held.shape[1] if held.numel() else getattr(module, "input_size_per_partition", None)
    if columns is None or width != tensor.shape[1] or not hasattr(module, "quant_method"):
        return None
    # Multiplying by ones and zeros is exact, so the results can be compared for equality.
    units = torch.zeros(len(columns), tensor.shape[1], dtype=held.dtype)
    units[torch.arange(len(columns)), columns] = 1
    return module.quant_method.apply(module, units).T
