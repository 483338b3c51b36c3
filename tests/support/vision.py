"""Tiny vision-language models, and a store with images: `from support.vision import tiny`."""

import base64

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlake.loop.config import EngineConfig, FrozenModel
from rlake.loop.inference.build import in_process
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Sampling
from rlake.loop.models.load import load
from rlake.store import Store

TINY = {
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


def tiny(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A tiny Qwen2.5-VL with its tokenizer."""
    return load(FrozenModel.model_validate(TINY), seed=seed)


def seeing(store: Store, **sampling: object) -> ChatPolicy:
    """A policy that answers with it, and shows it the images of a store."""
    engine = EngineConfig.model_validate({"transformers": {}})
    given, config = Sampling(**sampling), FrozenModel.model_validate(TINY)  # type: ignore[arg-type]
    return in_process(*tiny(), engine, config, sampling=given, store=store)


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
