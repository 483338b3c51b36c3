"""A policy's weights as named tensors: out of a model, into one, and their digest."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...store.errors import JobError
from .digest import difference, weights_digest
from .lora import adapter_part, as_peft, from_peft, has_adapter


def state_of(model: PreTrainedModel, *, names: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a policy's weights under the names that they have in files; nothing is copied.

    Of a policy with an adapter, only that, in peft's names. Weights that are tied come once, under
    the name among `names`, or else under the one that transformers takes.
    """
    if has_adapter(model):
        return as_peft(adapter_part(model.state_dict()))
    state = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    chosen = (_chosen(group, names, tied) for group in _same(state))
    return {name: state[name].detach() for name in chosen}


def copied(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a copy of a policy's weights on the CPU, which training does not change."""
    taken = state_of(model)
    return {n: t.detach().to("cpu", copy=True).contiguous() for n, t in taken.items()}


def digest_of(model: PreTrainedModel, *, names: Collection[str] = ()) -> str:
    """Digest what a model would serve now; equal to that of the weights put into it."""
    return weights_digest(state_of(model, names=names))


def put_state(
    model: PreTrainedModel, state: Mapping[str, Tensor], *, told: str = "what came"
) -> None:
    """Put named tensors into a model of the same shape.

    Raises JobError for those of another model; then nothing is changed.
    """
    if has_adapter(model) or _is_adapter(state):
        found = from_peft(state)
        wrong = difference(adapter_part(model.state_dict()), found)
    else:
        found = dict(state)
        wrong = difference(state_of(model, names=found), found)
    if wrong is not None:
        raise JobError(f"{told} belongs to another model: {wrong}")
    with torch.no_grad():
        model.load_state_dict(found, strict=False)


def _is_adapter(names: Iterable[str]) -> bool:
    return any(".lora_" in name for name in names)


def _same(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of a state, those of the same memory together."""
    groups: dict[object, list[str]] = {}
    for name, tensor in state.items():
        where = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        groups.setdefault(where, []).append(name)
    return list(groups.values())


def _chosen(group: Sequence[str], names: Collection[str], tied: Collection[str]) -> str:
    known = [name for name in group if name in names]
    return (known or [name for name in group if name not in tied] or list(group))[0]
