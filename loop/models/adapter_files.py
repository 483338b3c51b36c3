"""Folders of adapters in peft's format: what lies in them, and the model below them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ...store.errors import ConfigError
from .atomic_folder import remove_folder, writing
from .digest import weights_digest
from .lora import base_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WEIGHTS = "adapter_model.safetensors"
"""The adapter's weights."""
SETTINGS = "adapter_config.json"
"""What peft must know of an adapter."""
BASE = "base.json"
"""Beside an adapter of ours: where the model below it lies, and the digest of its weights."""
BESIDE = "../../base"
"""Where that is, seen from a policy of the run, when it lies nowhere else."""


def is_adapter(folder: str | Path) -> bool:
    """Tell whether a folder holds an adapter in place of a whole model."""
    return (Path(folder) / SETTINGS).is_file()


def write_settings(
    model: PreTrainedModel,
    target: Path,
    *,
    run_folder: Path,
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    """Write what goes with each version of an adapter, and the model below it.

    That model goes to the run's folder, unless it lies elsewhere as a whole. Raises ConfigError
    when it is another than the one that the run was started with.
    """
    settings = _settings(model)
    below = base_part(model.state_dict())
    digest = weights_digest(below)
    if (target / BASE).is_file():
        if json.loads((target / BASE).read_text())["digest"] == digest:
            return
        raise ConfigError(
            f"the model below the adapters in `{run_folder}` is another than when the run was "
            "started; restore it, or name a new run with `--set name=...`"
        )
    place = settings.base_model_name_or_path or ""
    if place and Path(place).exists():
        place = settings.base_model_name_or_path = str(Path(place).absolute())
    elif not place:
        place, settings.base_model_name_or_path = BESIDE, str((run_folder / "base").absolute())
        if not (run_folder / "base").is_dir():
            _write_base(model, below, run_folder / "base", tokenizer)
    settings.save_pretrained(target)
    (target / BASE).write_text(json.dumps({"path": place, "digest": digest}))


def _settings(model: PreTrainedModel) -> Any:
    return model.peft_config["default"]  # type: ignore[attr-defined]


def _write_base(
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
    target: Path,
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    partial = target.with_name(f".{target.name}.partial")
    remove_folder(partial)
    with writing(target, partial=partial):
        partial.mkdir(parents=True)
        model.config.save_pretrained(partial)
        if model.can_generate():
            model.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        first: dict[int, str] = {}  # tied weights are stored once
        for name, value in state.items():
            first.setdefault(value.data_ptr(), name)
        kept = {name: state[name].contiguous() for name in first.values()}
        save_file(kept, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(target)


def base_of(folder: Path) -> tuple[str, str | None]:
    """Return where the model below an adapter lies, and the digest it must have, if known."""
    if (folder / BASE).is_file():
        found = json.loads((folder / BASE).read_text())
        beside = folder / found["path"]
        return str(beside if beside.is_dir() else found["path"]), found["digest"]
    settings = json.loads((folder / SETTINGS).read_text())
    place = settings.get("base_model_name_or_path")
    if not place:
        raise ConfigError(f"`{folder}` is an adapter, and `{SETTINGS}` in it names no model")
    return place, None


def add_stored(model: PreTrainedModel, folder: Path, *, digest: str | None) -> None:
    """Add the adapter of a folder to the model below it.

    Raises ConfigError when that is not the model that the adapter was trained on, or the adapter
    does not fit. Draws no random numbers: another thread may be training.
    """
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict

    if digest is not None and weights_digest(model.state_dict()) != digest:
        raise ConfigError(
            f"the adapter in `{folder}` was trained on another model than `{model.name_or_path}`, "
            "whose weights have changed since"
        )
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"`{folder}` is an adapter without weights: there is no `{WEIGHTS}`")
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
        found = set_peft_model_state_dict(
            model, load_file(folder / WEIGHTS), low_cpu_mem_usage=True
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"the adapter in `{folder}` does not fit its model: {reason}") from error
    missing = [name for name in found.missing_keys if ".lora_" in name]
    if missing or found.unexpected_keys:
        name = (missing or found.unexpected_keys)[0]
        raise ConfigError(f"the adapter in `{folder}` does not fit its model: see `{name}`")
