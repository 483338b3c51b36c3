"""Scale rotary position embeddings, as a configuration says, to sequences longer than trained on.

Only scalings whose frequencies do not depend on how long a sequence is: with the others
(`dynamic`, `longrope`), tokens sampled early would have log-probs of other frequencies than the
trainer's, which sees the whole sequence.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.errors import ConfigError
from ..config import RopeParameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LENGTH = "max_position_embeddings"
KEYS = ("rope_parameters", _LENGTH)
"""What of a configuration says how positions are embedded."""


def scale_rope(settings: "PretrainedConfig", given: RopeParameters | None) -> None:
    """Set the parameters and the longest sequence of a model's configuration.

    Doing it again changes nothing. Raises ConfigError for a model that has no rotary position
    embeddings, different ones by layer, or for images with a scaling that engines lack there.
    """
    if given is None:
        return
    text, kind = settings.get_text_config(), settings.model_type
    had = getattr(text, "rope_parameters", None)
    if not had:
        raise ConfigError(
            f"`model.rope_parameters` is for rotary position embeddings, and a `{kind}` model has "
            "none; leave it out"
        )
    if any(isinstance(value, dict) for value in had.values()):
        raise ConfigError(
            f"a `{kind}` model has rotary position embeddings by layer ({', '.join(had)}); leave "
            "`model.rope_parameters` out, and set them in the folder's `config.json`"
        )
    if "mrope_section" in had and given.rope_type not in ("default", "yarn"):
        raise ConfigError(
            f"`model.rope_parameters` is {given.rope_type}, which engines lack for models that "
            "read images; set `rope_type` to yarn"
        )
    own = given.model_dump(exclude_none=True)
    kept = {k: v for k, v in had.items() if k not in RopeParameters.model_fields}
    made = {**kept, "rope_theta": had["rope_theta"], **own}
    if given.factor is not None:
        trained = given.original_max_position_embeddings or _trained_length(text, had)
        if given.rope_type != "linear":  # transformers knows no such key there
            made["original_max_position_embeddings"] = trained
        setattr(text, _LENGTH, round(trained * given.factor))
    text.rope_parameters = made


def _trained_length(text: "PretrainedConfig", had: Mapping[str, Any]) -> int:
    """Return the longest sequence before any scaling."""
    if length := had.get("original_max_position_embeddings"):
        return int(length)
    longest = int(getattr(text, _LENGTH))
    return round(longest / had["factor"]) if had.get("rope_type") == "linear" else longest


def rope_of(settings: "PretrainedConfig") -> dict[str, Any]:
    """Return the keys of a configuration's text part that `scale_rope` sets."""
    text = settings.get_text_config()
    return {key: getattr(text, key, None) for key in KEYS}


def set_rope(settings: "PretrainedConfig", kept: Mapping[str, Any]) -> None:
    """Set what `rope_of` returned."""
    for key, value in kept.items():
        if value is not None:
            setattr(settings.get_text_config(), key, value)


def scaled_arguments(folder: Path, given: RopeParameters | None) -> dict[str, Any]:
    """Return vLLM's arguments for a model folder: what its own `config.json` does not say."""
    found = json.loads((folder / "config.json").read_text())
    part = found.get("text_config", found)
    made: dict[str, Any] = {}
    if given is not None:
        from transformers import AutoConfig

        settings = AutoConfig.from_pretrained(str(folder))
        scale_rope(settings, given)
        part = rope_of(settings)
        made["hf_overrides"] = {"text_config": part} if "text_config" in found else part
    if (part.get("rope_parameters") or {}).get("rope_type") == "linear":
        # vLLM takes the length in the file for that before scaling
        made["max_model_len"] = part[_LENGTH]
    return made
