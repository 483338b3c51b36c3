"""Folders of adapters in peft's format: their files, and their base model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ...store.errors import ConfigError, message_of
from .atomic_folder import replace_folder, save_settings
from .lora import base_part
from .rope import rope_of
from .state_dict import weights_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WEIGHTS = "adapter_model.safetensors"
"""The adapter's weights."""
SETTINGS = "adapter_config.json"
"""The adapter's configuration, which peft reads."""
BASE = "base.json"
"""In adapters that rlake writes: the path of the base model, the digest of its weights, and its
rotary position embeddings, which a configuration may have scaled."""
RUN_BASE = "../../base"
"""The base model in the run's folder, relative to a version's folder."""


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds an adapter and not a whole model."""
    return (Path(folder) / SETTINGS).is_file()


def write_settings(
    model: "PreTrainedModel",
    target: Path,
    *,
    run_folder: Path,
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    """Write the files that all versions of an adapter share, and its base model.

    The base model is written to the run's folder, unless it is a folder already. Raises ConfigError
    if it is not the one that the run was started with.
    """
    settings = _settings(model)
    below = base_part(model.state_dict())
    digest = weights_digest(below)
    if (target / BASE).is_file():
        if json.loads((target / BASE).read_text())["digest"] == digest:
            return
        raise ConfigError(
            f"the base model of the adapters in `{run_folder}` has changed since the run was "
            "started; restore it, or name a new run with `--set name=...`"
        )
    place = settings.base_model_name_or_path or ""
    if place and Path(place).exists():
        place = settings.base_model_name_or_path = str(Path(place).absolute())
    elif not place:
        place, settings.base_model_name_or_path = RUN_BASE, str((run_folder / "base").absolute())
        if not (run_folder / "base").is_dir():
            _write_base(model, below, run_folder / "base", tokenizer)
    settings.save_pretrained(target)
    about = {"path": place, "digest": digest, "rope": rope_of(model.config)}
    (target / BASE).write_text(json.dumps(about))


def _settings(model: "PreTrainedModel") -> Any:
    return model.peft_config["default"]  # type: ignore[attr-defined]


def _write_base(
    model: "PreTrainedModel",
    state: Mapping[str, Tensor],
    target: Path,
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    first: dict[int, str] = {}  # safetensors refuses tensors that share memory
    for name, value in state.items():
        first.setdefault(value.data_ptr(), name)
    kept = {name: state[name].contiguous() for name in first.values()}

    def fill(partial: Path) -> None:
        save_settings(model, tokenizer, partial)
        save_file(kept, partial / "model.safetensors", metadata={"format": "pt"})

    replace_folder(target, fill, durable=False)


def base_of(folder: Path) -> tuple[str, str | None]:
    """Return the base model of an adapter, and the digest that it must have, if known."""
    if (folder / BASE).is_file():
        found = json.loads((folder / BASE).read_text())
        base = folder / found["path"]
        return str(base if base.is_dir() else found["path"]), found["digest"]
    settings = json.loads((folder / SETTINGS).read_text())
    place = settings.get("base_model_name_or_path")
    if not place:
        raise ConfigError(f"`{folder}` is an adapter, and `{SETTINGS}` in it names no model")
    return place, None


def rope_in(folder: Path) -> dict[str, Any]:
    """Return the rotary position embeddings with which an adapter was trained, if known."""
    file = folder / BASE
    return json.loads(file.read_text()).get("rope", {}) if file.is_file() else {}


def name_base(source: Path, target: Path) -> None:
    """Write where the base model is, as a path that does not depend on the adapter's folder."""
    place, digest = base_of(source)
    place = str(Path(place).resolve()) if Path(place).is_dir() else place
    about = {"path": place, "digest": digest, "rope": rope_in(source)}
    (target / BASE).write_text(json.dumps(about))
    settings = json.loads((target / SETTINGS).read_text())
    settings["base_model_name_or_path"] = place
    (target / SETTINGS).write_text(json.dumps(settings, indent=2))


def check_base(model: "PreTrainedModel", folder: Path, *, digest: str | None) -> None:
    """Raise ConfigError if the adapter in a folder was trained on another model than this."""
    if digest is not None and weights_digest(model.state_dict()) != digest:
        raise ConfigError(
            f"the adapter in `{folder}` was trained on another model than `{model.name_or_path}`, "
            "whose weights have changed since"
        )


def add_stored(model: "PreTrainedModel", folder: Path) -> None:
    """Add the adapter of a folder to its base model.

    Raises ConfigError if it does not fit. Draws no random numbers: another thread may be training.
    """
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict

    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"`{folder}` is an adapter without weights: there is no `{WEIGHTS}`")
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        # on the meta device, where peft initializes nothing at random
        inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
        found = set_peft_model_state_dict(
            model, load_file(folder / WEIGHTS), low_cpu_mem_usage=True
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the adapter in `{folder}` does not fit its model: {message_of(error)}"
        ) from error
    missing = [name for name in found.missing_keys if ".lora_" in name]
    if missing or found.unexpected_keys:
        name = (missing or found.unexpected_keys)[0]
        raise ConfigError(f"the adapter in `{folder}` does not fit its model: see `{name}`")
