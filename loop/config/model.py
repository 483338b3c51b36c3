"""The model that a run starts from."""

import string
from typing import Self

from pydantic import Field, field_validator, model_validator

from .section import Float, Int, Section


class TinyModel(Section):
    """A small Qwen3 model made from scratch, with a tokenizer of single characters."""

    hidden_size: Int = Field(default=128, ge=8)
    layers: Int = Field(default=2, ge=1)
    heads: Int = Field(default=4, ge=1)
    intermediate_size: Int | None = None
    """None: four times hidden_size."""
    init_std: Float = Field(default=0.02, gt=0)
    """Standard deviation of the weights at the start."""
    max_length: Int = Field(default=1024, ge=8)
    """Most tokens of a sequence."""
    alphabet: str = string.printable
    """Each of these characters is a token."""


class ModelConfig(Section):
    """The model that a run starts from."""

    path: str | None = None
    """Folder or hub name in the Hugging Face format."""
    tiny: TinyModel | None = None
    """Instead of a path: a model made from scratch."""
    dtype: str = "float32"
    """Only float32 so far; bfloat16 and float16 are planned."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$")
    """auto takes a GPU when there is one; cuda:1 is the second."""

    @field_validator("dtype")
    @classmethod
    def _trainable(cls, dtype: str) -> str:
        if dtype != "float32":
            raise ValueError(
                f"must be float32 for now, got {dtype!r}: bfloat16 would lose small updates without"
                " float32 master weights, and float16 needs loss scaling; both are planned"
            )
        return dtype

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.path is None and self.tiny is None:
            raise ValueError("has neither `path` nor `tiny`; name a model folder, or set `tiny`")
        if self.path is not None and self.tiny is not None:
            raise ValueError("has both `path` and `tiny`; set one of them to null")
        return self
