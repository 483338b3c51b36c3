"""Tiny vision-language models, and a store with images: `from support.vision import tiny`."""

import base64
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlake.loop.config import EngineConfig, FrozenModel
from rlake.loop.inference.build import in_process
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Sampling
from rlake.loop.models.load import load
from rlake.store import Store

TINY: dict[str, Any] = {
    "from_scratch": {
        "hidden_size": 32,
        "layers": 2,
        "heads": 2,
        "init_std": 0.2,
        "max_length": 128,
        "alphabet": "0123rg=?",
        "vision": {"hidden_size": 16, "layers": 2, "heads": 2, "max_pixels": 1024},
    }
}
"""Its weights are large, so that its answers depend on what it sees."""


FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def spec(family: str = FAMILIES[0], **more: object) -> dict[str, Any]:
    """The section `model` of a tiny one of a family, in which `more` differs."""
    base = TINY["from_scratch"]
    vision = {**base["vision"], "family": family}
    return {"from_scratch": {**base, "vision": vision, **more}}


def tiny(
    seed: int = 0, *, family: str = FAMILIES[0]
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A tiny model with its tokenizer."""
    return load(FrozenModel.model_validate(spec(family)), seed=seed)


def seeing(store: Store, *, family: str = FAMILIES[0], **sampling: object) -> ChatPolicy:
    """A policy that answers with it, and shows it the images of a store."""
    engine = EngineConfig.model_validate({"transformers": {}})
    given, config = Sampling(**sampling), FrozenModel.model_validate(spec(family))  # type: ignore[arg-type]
    return in_process(*tiny(family=family), engine, config, sampling=given, store=store)


def data_url(data: bytes, mime: str = "image/png") -> str:
    """The bytes of an image as clients of OpenAI's API send them."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def noise(width: int, height: int, *, seed: int = 0) -> bytes:
    """A PNG of random pixels."""
    import io

    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
