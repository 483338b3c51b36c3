"""Named tensors: their digest, and how those of two models differ."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest names, types, shapes and bytes of tensors; equal weights have equal digests."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """Say how tensors of another model differ from ours in names and shapes, or None.

    >>> difference({"a": torch.zeros(2)}, {"a": torch.zeros(3), "b": torch.zeros(1)})
    'it has `b`, which this model has not; `a` has shape [3] in place of [2]'
    """
    message = []
    if missing := [name for name in ours if name not in theirs]:
        message.append(f"it has no {_some(missing)}")
    if unknown := [name for name in theirs if name not in ours]:
        message.append(f"it has {_some(unknown)}, which this model has not")
    both = [name for name in ours if name in theirs]
    others = [name for name in both if ours[name].shape != theirs[name].shape]
    if others:
        first, more = others[0], len(others) - 1
        shapes = [list(found[first].shape) for found in (theirs, ours)]
        message.append(f"`{first}` has shape {shapes[0]} in place of {shapes[1]}{_more(more)}")
    return "; ".join(message) or None


def _some(names: list[str]) -> str:
    return f"`{names[0]}`{_more(len(names) - 1)}"


def _more(number: int) -> str:
    return f" (and {number} more)" if number else ""
