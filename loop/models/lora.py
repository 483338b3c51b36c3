"""Low-rank adapters through peft: added to a model, switched off, and split from the base model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...store.errors import ConfigError, nearest
from ..config import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_adapter(model: "PreTrainedModel", config: LoraConfig, *, seed: int) -> None:
    """Add an adapter that changes nothing yet, and freeze all other parameters.

    Raises ConfigError for targets that the model does not have, and for embeddings and LM head.
    """
    from peft import LoraConfig as Settings

    _check_targets(model, config.targets)
    settings = Settings(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=list(config.targets) if config.targets else "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(settings)


def _check_targets(model: "PreTrainedModel", targets: tuple[str, ...] | None) -> None:
    vocabulary = {model.get_input_embeddings(), model.get_output_embeddings()}
    for target in targets or ():
        found = {n: m for n, m in model.named_modules() if f".{n}".endswith(f".{target}")}
        if not found:
            ends = {n.rpartition(".")[2] for n, m in model.named_modules() if _is_linear(m)}
            raise ConfigError(
                f"`model.lora.targets` names `{target}`, and the model has no such layer"
                f"{nearest(target, ends)}; it has {', '.join(f'`{end}`' for end in sorted(ends))}"
            )
        wrong = [name for name, module in found.items() if module in vocabulary]
        if wrong:
            raise ConfigError(
                f"`model.lora.targets` names `{target}`, and `{wrong[0]}` is the embedding or LM "
                "head; adapters are for the layers between; leave it out"
            )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def has_adapter(model: nn.Module) -> bool:
    """Return whether a model has an adapter."""
    return bool(getattr(model, "peft_config", None))


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Disable a model's adapter; which parameters are trained does not change."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    # `enable_adapters` sets `requires_grad` too, and would thaw frozen adapters.
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = trained[name]


def adapter_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter's part of a model's state."""
    return {name: value for name, value in state.items() if ".lora_" in name}


def base_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state without its adapter, under the names that it has without one."""
    return {
        name.replace(".base_layer.", "."): value
        for name, value in state.items()
        if ".lora_" not in name
    }


def as_peft(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's state under the names that peft gives it in files."""
    return {
        f"base_model.model.{name.replace('.default.', '.')}": value.detach().cpu().contiguous()
        for name, value in state.items()
    }


def from_peft(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's state under the names of the model's parameters."""
    return {
        name.removeprefix("base_model.model.").replace(".weight", ".default.weight"): value
        for name, value in state.items()
    }


def merge(model: "PreTrainedModel") -> None:
    """Merge a model's adapters into its weights, and remove them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    for name, layer in layers.items():
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config
    # Else `save_pretrained` would save an adapter.
    model._hf_peft_config_loaded = False  # pyright: ignore[reportPrivateUsage]
    model.name_or_path = ""  # the merged model is not that of any folder
