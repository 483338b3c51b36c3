"""A state of nested dicts as named tensors and the rest, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_PLACE = "the tensor"
"""The one key of what stands where a tensor was taken out."""


def apart(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Take the tensors out of a state: by their path, and what is left.

    >>> tensors, rest = apart({"a": {"b": torch.ones(1), "c": 2}})
    >>> list(tensors), rest
    (['a/b'], {'a': {'b': {'the tensor': 'a/b'}, 'c': 2}})
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            tensors[path] = node
            return {_PLACE: path}
        if isinstance(node, Mapping):
            return {k: walk(v, f"{path}/{k}" if path else str(k)) for k, v in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(walk(v, f"{path}/{i}") for i, v in enumerate(node))
        return node

    rest = walk(state, "")
    return tensors, rest


def together(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """Put the tensors back where `apart` took them."""
    if isinstance(rest, dict):
        if list(rest) == [_PLACE]:
            return tensors[rest[_PLACE]]
        return {k: together(tensors, v) for k, v in rest.items()}
    if isinstance(rest, list | tuple):
        return type(rest)(together(tensors, v) for v in rest)
    return rest


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, those in parts part by part, so that training may go on."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    return BlockingAsyncStager().stage(dict(tensors))


def space(path: str, size: torch.Size, dtype: torch.dtype, like: Mapping[str, Tensor]) -> Tensor:
    """Make room for a tensor, in parts where `like` has one of that size in parts.

    `like` knows it by its own path, or by that of what it belongs to.
    """
    model = like.get(path, like.get(path.rpartition("/")[0]))
    if isinstance(model, DTensor) and model.shape == size:
        return torch.empty_like(model, dtype=dtype)
    return torch.empty(size, dtype=dtype)
