"""Adapters in the workers of vLLM: put into a slot, and compared with what it then holds."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ADAPTER = 1
"""The number of the policy's adapter in vLLM, which holds no other."""


def put_adapter(
    manager: Any, given: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> str | None:
    """Replace the adapter in vLLM's manager of them; return why that is refused, or None.

    vLLM's own call, `add_lora`, reads a folder. This gives it the tensors whose digest was checked.
    """
    from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]

    slots = manager._adapter_manager
    helper = _helper(settings)
    try:
        helper.validate_legal(manager.lora_config)
    except ValueError as error:
        return f"vLLM cannot serve this adapter: {error}"
    known = slots.modules.keys() | {
        part for parts in slots.packed_modules.values() for part in parts
    }
    if lost := [name for name, _, _ in _pairs(manager, helper, given) if name not in known]:
        return f"vLLM has no adapter for `{lost[0]}`"
    made = LoRAModel.from_lora_tensors(
        ADAPTER,
        # Copied: vLLM keeps them, and scales B in place.
        {name: tensor.clone() for name, tensor in given.items()},
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=_mapper(manager),
    )
    slots.remove_adapter(ADAPTER)
    slots.add_adapter(made)
    slots.activate_adapter(ADAPTER)
    return None


@torch.inference_mode()
def adapter_differences(
    manager: Any, settings: Mapping[str, Any], given: Mapping[str, Tensor]
) -> tuple[int, list[str]]:
    """Compare an adapter with that in vLLM's slot; return how many tensors, and which differ.

    What is sharded over several GPUs is not compared.
    """
    slots = manager._adapter_manager
    slot = slots.lora_index_to_id.index(ADAPTER)
    places = {name: (module, 0) for name, module in slots.modules.items()}
    for whole, parts in slots.packed_modules.items():
        places |= {part: (slots.modules[whole], i) for i, part in enumerate(parts)}
    compared, differ = 0, []
    for name, kind, tensor in _pairs(manager, _helper(settings), given):
        module, i = places[name]
        held = getattr(module, f"lora_{kind}_stacked")[i][slot, 0]
        want = tensor.to(held.dtype)
        # Beside the tensor are zeros, since a slot has room for the largest rank.
        held, rest = held[: want.shape[0], : want.shape[1]], held.count_nonzero()
        if held.shape != want.shape or getattr(module, "tp_size", 1) > 1:
            continue
        compared += 1
        if not torch.equal(held.cpu(), want) or rest != want.count_nonzero():
            differ.append(f"{name}.lora_{kind.upper()}")
    return compared, differ


def _pairs(
    manager: Any, helper: Any, given: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield vLLM's name of each layer with its A, and with its B times the adapter's scale."""
    from vllm.lora.utils import parse_fine_tuned_lora_name  # pyright: ignore[reportMissingImports]

    for name, tensor in given.items():
        layer, is_a = parse_fine_tuned_lora_name(name, _mapper(manager))
        own, _ = parse_fine_tuned_lora_name(name)  # by which peft's settings name it
        _, scale = helper.get_rank_and_scaling(own)
        whole = tensor.to(manager.lora_config.lora_dtype)
        yield layer, "a" if is_a else "b", whole if is_a or scale == 1 else whole * scale


def _helper(settings: Mapping[str, Any]) -> Any:
    from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]

    return PEFTHelper.from_dict(dict(settings))


def _mapper(manager: Any) -> Any:
    found = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
    return None if found is None else found.get_rename_mapper()
