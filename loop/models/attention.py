"""Implementations of attention by their names in transformers, as far as a machine has them."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import import_utils

from ...store.errors import ConfigError


def attention_of(model: nn.Module) -> str:
    """Return the name of a model's attention."""
    return str(model.config._attn_implementation)  # pyright: ignore


def is_flash(attention: str) -> bool:
    """Return whether an attention is one of the flash_attention packages."""
    return attention.startswith("flash_attention")


def set_attention(model: PreTrainedModel, attention: str, *, key: str) -> PreTrainedModel:
    """Set the attention of a model that is on its device, and return the model.

    Raises ConfigError, with the configuration's key, if machine or model do not support it.
    """
    if attention == "sdpa":  # what models are loaded with, or eager where they do not support it
        return model
    reason = _lacking(attention, model.device)
    try:
        if reason is None:
            model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        reason = str(error).splitlines()[0]
    if reason is None and attention_of(model) != attention:
        reason = f"`{type(model).__name__}` cannot change its attention"
    if reason is not None:
        raise ConfigError(
            f"`{key}` is {attention}, and {reason}; available here: "
            f"{', '.join(available(model.device))}; set it to one of them"
        )
    return model


def available(device: torch.device) -> list[str]:
    """Return the names of the attentions that a device supports."""
    others = ("flex_attention", *(f"flash_attention_{version}" for version in (2, 3, 4)))
    return ["sdpa", "eager", *(name for name in others if _lacking(name, device) is None)]


def _lacking(attention: str, device: torch.device) -> str | None:
    """Return what a device lacks for an attention, or None."""
    if attention == "eager":
        return None
    if device.type != "cuda":
        return f"the model is on `{device}`, where it has no gradient; it needs a GPU"
    if not is_flash(attention):
        return None
    version = attention.rpartition("_")[2]
    # not transformers' own choice, which may download a kernel
    if not getattr(import_utils, f"is_flash_attn_{version}_available")():
        return "its package is not installed, or does not fit this GPU"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return f"`{torch.cuda.get_device_name(device)}` does not support bfloat16, which it needs"
    return None
