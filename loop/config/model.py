"""The networks beside the policy, and what of the policy is trained."""

import re
import string
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from .base import Float, Int, Section, Share


class LoraConfig(Section):
    """A low-rank adapter (arXiv:2106.09685): only it is trained, checkpointed and published."""

    rank: Int = Field(default=32, ge=1)
    """Width of the adapter in each layer."""
    alpha: Float = Field(default=32.0, gt=0)
    """What the adapter adds is multiplied with alpha / rank."""
    dropout: Share = 0.0
    """Share of the adapter's inputs that are left out in training."""
    targets: tuple[str, ...] | None = None
    """Names of layers, or their ends, such as `q_proj`; None: all linear layers but the last."""


class CriticConfig(Section):
    """The network that says how much reward is still to come, for algorithms that need one."""

    path: str | None = None
    """Folder of the model that it starts from; None: what the policy starts from."""
    learning_rate: Float | None = Field(default=None, gt=0)
    """None: the policy's."""
    warmup_steps: Int = Field(default=0, ge=0)
    """Training steps at the start in which only the critic learns."""


def _expressions(given: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in given:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`{pattern}` is no regular expression: {error}") from error
    return given


Patterns = Annotated[tuple[str, ...], AfterValidator(_expressions)]
"""Regular expressions, each looked for anywhere in a name."""


class TinyModel(Section):
    """A small Qwen3 model made from scratch, with a tokenizer of single characters."""

    hidden_size: Int = Field(default=128, ge=8, le=2**16)
    layers: Int = Field(default=2, ge=1, le=1000)
    heads: Int = Field(default=4, ge=1, le=2**16)
    intermediate_size: Int | None = Field(default=None, ge=1, le=2**20)
    """None: four times hidden_size."""
    init_std: Float = Field(default=0.02, gt=0)
    """Standard deviation of the weights at the start."""
    max_length: Int = Field(default=1024, ge=8, le=2**24)
    """Most tokens of a sequence."""
    alphabet: str = Field(default=string.printable, min_length=1)
    """Each of these characters is a token."""

    @model_validator(mode="after")
    def _even(self) -> Self:
        width = self.hidden_size // self.heads
        if width < 2 or width % 2:
            raise ValueError(
                f"`hidden_size` {self.hidden_size} with {self.heads} `heads` gives each a width of "
                f"{width}, expected an even number; set `hidden_size` to a multiple of 2 x `heads`"
            )
        return self


class FrozenModel(Section):
    """A model that is asked and not trained."""

    places: ClassVar[tuple[str, ...]] = ("path", "from_scratch", "run")
    """The keys that say which model; one of them is given."""

    path: str | None = None
    """Folder or hub name in the Hugging Face format."""
    from_scratch: TinyModel | None = None
    """Instead of a path: a model made from scratch."""
    run: str | None = None
    """Instead of a path: another run of the store, whose newest weights are taken."""
    version: Int | None = Field(default=None, ge=0)
    """Which of that run's policies; None: the newest when this run begins, from then on that."""
    digest: str | None = None
    """What the digest of these weights must be; None: what is on record."""
    tool_call_format: Literal["hermes", "llama", "mistral", "json"] = "hermes"
    """How it writes calls of tools: `<tool_call>` as Hermes and Qwen, behind `<|python_tag|>` or as
    bare JSON, behind `[TOOL_CALLS]`, or as an answer that is nothing but JSON."""
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
        given = [name for name in self.places if getattr(self, name) is not None]
        if not given:
            raise ValueError(
                "has neither `path` nor `from_scratch`; name a model folder, or set `from_scratch`"
            )
        if len(given) > 1:
            raise ValueError(f"has both `{given[0]}` and `{given[1]}`; set one of them to null")
        if self.run is None and (self.version is not None or self.digest is not None):
            raise ValueError("has a `version` or `digest` without the `run` whose they are")
        return self


class ModelConfig(FrozenModel):
    """The model that a run starts from."""

    lora: LoraConfig | None = None
    """Train a low-rank adapter on top of it; None: the model itself."""
