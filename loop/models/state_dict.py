"""A policy's weights as named tensors: from a model, into one, and their digest."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...store.errors import JobError
from .lora import adapter_part, as_peft, from_peft, has_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def state_of(model: "PreTrainedModel", *, names: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a policy's weights under their names in files; nothing is copied.

    For a policy with an adapter, only the adapter's, under peft's names. Tied weights appear once,
    under the name among `names`, or else under the one that transformers saves.
    """
    if has_adapter(model):
        return as_peft(adapter_part(model.state_dict()))
    state = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    chosen = (_chosen(group, names, tied) for group in _same(state))
    return {name: state[name].detach() for name in chosen}


def copied(model: "PreTrainedModel", dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return a copy of a policy's weights on the CPU, those of floating point in `dtype`."""
    # `copy`: on a CPU, `to` alone would return the tensors that training changes.
    return {
        name: tensor.to("cpu", _type(tensor, dtype), copy=True).contiguous()
        for name, tensor in state_of(model).items()
    }


def cast(state: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return tensors with those of floating point in another type; None: in their own."""
    return {name: tensor.to(_type(tensor, dtype)) for name, tensor in state.items()}


def _type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def digest_of(model: "PreTrainedModel", *, names: Collection[str] = ()) -> str:
    """Return the digest of a model's current weights; it equals that of the weights put into it."""
    return weights_digest(state_of(model, names=names))


def put_state(
    model: "PreTrainedModel", state: Mapping[str, Tensor], *, source: str = "the received state"
) -> None:
    """Load named tensors into a model of the same shape.

    Raises JobError for tensors of another model; then nothing is changed.
    """
    if has_adapter(model) or _is_adapter(state):
        found = from_peft(state)
        wrong = difference(adapter_part(model.state_dict()), found)
    else:
        found = dict(state)
        wrong = difference(state_of(model, names=found), found)
    if wrong is not None:
        raise JobError(f"{source} belongs to another model: {wrong}")
    with torch.no_grad():
        # Not strict: an adapter is a part of the state, and tied weights come once. All names were
        # compared above.
        model.load_state_dict(found, strict=False)


def _is_adapter(names: Iterable[str]) -> bool:
    return any(".lora_" in name for name in names)


def _same(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of a state, grouped by the memory of their tensors."""
    groups: dict[object, list[str]] = {}
    for name, tensor in state.items():
        where = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        groups.setdefault(where, []).append(name)
    return list(groups.values())


def _chosen(group: Sequence[str], names: Collection[str], tied: Collection[str]) -> str:
    known = [name for name in group if name in names]
    return (known or [name for name in group if name not in tied] or list(group))[0]


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        # as bytes, since numpy has no bfloat16
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """Return how tensors of another model differ from ours in names and shapes, or None.

    >>> difference({"a": torch.zeros(2)}, {"a": torch.zeros(3), "b": torch.zeros(1)})
    'it has `b`, which this model does not; `a` has shape [3] instead of [2]'
    """
    message = []
    if missing := [name for name in ours if name not in theirs]:
        message.append(f"it lacks {_some(missing)}")
    if unknown := [name for name in theirs if name not in ours]:
        message.append(f"it has {_some(unknown)}, which this model does not")
    both = [name for name in ours if name in theirs]
    others = [name for name in both if ours[name].shape != theirs[name].shape]
    if others:
        first, more = others[0], len(others) - 1
        shapes = [list(found[first].shape) for found in (theirs, ours)]
        message.append(f"`{first}` has shape {shapes[0]} instead of {shapes[1]}{_more(more)}")
    return "; ".join(message) or None


def _some(names: list[str]) -> str:
    return f"`{names[0]}`{_more(len(names) - 1)}"


def _more(number: int) -> str:
    return f" (and {number} more)" if number else ""
