"""The policy's model, LoRA, and the other networks of a run."""

import re
import string
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from .base import Float, Int, Section, Share

Attention = Literal[
    "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"
]
"""Implementations of attention, as transformers names them."""


class LoraConfig(Section):
    """A low-rank adapter (arXiv:2106.09685): only it is trained, checkpointed and published."""

    rank: Int = Field(default=32, ge=1)
    """Rank of the adapter of each layer."""
    alpha: Float = Field(default=32.0, gt=0)
    """The adapter's output is multiplied by alpha / rank."""
    dropout: Share = 0.0
    """Dropout probability of the adapter's inputs in training."""
    targets: tuple[str, ...] | None = None
    """Layers with an adapter, by name or ending, such as `q_proj`.

    None: all linear layers but the LM head.
    """


class CriticConfig(Section):
    """The value network of algorithms that use one."""

    path: str | None = None
    """Folder of the model that the critic starts from; None: the policy's initial weights."""
    learning_rate: Float | None = Field(default=None, gt=0)
    """Learning rate of the critic; None: the policy's."""
    warmup_steps: Int = Field(default=0, ge=0)
    """Steps at the start of training in which only the critic is updated."""


def _expressions(given: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in given:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`{pattern}` is not a regular expression: {error}") from error
    return given


Patterns = Annotated[tuple[str, ...], AfterValidator(_expressions)]
"""Regular expressions, each of which may match anywhere in a name."""


class TinyVision(Section):
    """The part of a small vision-language model that reads images."""

    family: Literal["qwen2_5_vl", "qwen3_vl"] = "qwen2_5_vl"
    """The architecture; Qwen3-VL adds features of images to hidden states of later layers too."""
    patch_size: Int = Field(default=4, ge=1, le=64)
    """Width of a patch in pixels; 2 x 2 patches are one token."""
    hidden_size: Int = Field(default=32, ge=8, le=2**14)
    """Width of its hidden states."""
    layers: Int = Field(default=1, ge=1, le=100)
    """Number of its transformer layers."""
    heads: Int = Field(default=2, ge=1, le=2**10)
    """Number of its attention heads."""
    max_pixels: Int = Field(default=128 * 128, ge=64)
    """Images of more pixels are made smaller."""

    @model_validator(mode="after")
    def _even(self) -> Self:
        width = self.hidden_size // self.heads
        # positions in height and width, each by sines and cosines
        if self.hidden_size % self.heads or width % 4:
            raise ValueError(
                f"`hidden_size` {self.hidden_size} with {self.heads} `heads` does not give each a "
                "width that is a multiple of 4; set `hidden_size` to a multiple of 4 x `heads`"
            )
        return self


class TinyModel(Section):
    """A small Qwen3 model with random weights and a tokenizer of single characters."""

    hidden_size: Int = Field(default=128, ge=8, le=2**16)
    """Width of the hidden states."""
    layers: Int = Field(default=2, ge=1, le=1000)
    """Number of transformer layers."""
    heads: Int = Field(default=4, ge=1, le=2**16)
    """Number of attention heads."""
    intermediate_size: Int | None = Field(default=None, ge=1, le=2**20)
    """Width of the feed-forward layers; None: four times `hidden_size`."""
    init_std: Float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    experts: Int | None = Field(default=None, ge=2, le=2**15)
    """Number of experts of each layer (Qwen3-MoE), each `intermediate_size` wide; None: dense."""
    experts_per_token: Int = Field(default=2, ge=1)
    """Number of experts that compute a token, where there are `experts`."""
    max_length: Int = Field(default=1024, ge=8, le=2**24)
    """Most tokens of a sequence."""
    alphabet: str = Field(default=string.printable, min_length=1)
    """Characters of the tokenizer; each one is a token."""
    vision: TinyVision | None = None
    """Make it a Qwen2.5-VL or Qwen3-VL, which read images too; None: a model of text alone."""

    @model_validator(mode="after")
    def _even(self) -> Self:
        width = self.hidden_size // self.heads
        if width < 2 or width % 2:
            raise ValueError(
                f"`hidden_size` {self.hidden_size} with {self.heads} `heads` gives each a width of "
                f"{width}, expected an even number; set `hidden_size` to a multiple of 2 x `heads`"
            )
        if self.experts is not None and self.experts_per_token > self.experts:
            raise ValueError(
                f"`experts_per_token` is {self.experts_per_token}, and there are {self.experts} "
                "`experts`; set it to at most that"
            )
        return self


class RopeParameters(Section):
    """Scaling of rotary position embeddings, for sequences longer than a model was trained on.

    The keys are those of `rope_parameters` in a `config.json`; what is left out stays the model's.
    """

    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "default": (),
        "linear": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }
    """The keys that each type cannot do without."""
    takes: ClassVar[dict[str, tuple[str, ...]]] = {
        "default": (),
        "linear": (),
        "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate"),
        "llama3": (),
    }
    """The keys that each type may have besides, other than the two of all."""

    rope_type: Literal["default", "linear", "yarn", "llama3"]
    """How frequencies change: by `rope_theta` alone, all by `factor`, as in YaRN
    (arXiv:2309.00071), or as in Llama 3.1. `dynamic` and `longrope`, whose frequencies depend on
    the length of a sequence, would give engine and trainer different log-probs."""
    factor: Float | None = Field(default=None, ge=1)
    """How many times longer sequences become: `max_position_embeddings` becomes this many times
    `original_max_position_embeddings`."""
    original_max_position_embeddings: Int | None = Field(default=None, ge=1)
    """Longest sequence that the model was trained on; None: that in its `config.json`."""
    rope_theta: Float | None = Field(default=None, gt=0)
    """Base of the frequencies."""
    attention_factor: Float | None = Field(default=None, gt=0)
    """yarn: multiplies cosines and sines; None: as the paper recommends for `factor`."""
    beta_fast: Float | None = Field(default=None, gt=0)
    """yarn: rotations over the original length from which frequencies stay; None: 32."""
    beta_slow: Float | None = Field(default=None, gt=0)
    """yarn: rotations up to which frequencies are divided by `factor`; None: 1."""
    truncate: bool | None = None
    """yarn: whether these bounds are rounded to whole frequencies; None: they are."""
    low_freq_factor: Float | None = Field(default=None, gt=0)
    """llama3: wavelengths longer than the original length over this are scaled."""
    high_freq_factor: Float | None = Field(default=None, gt=0)
    """llama3: wavelengths shorter than the original length over this stay."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = {name for name, value in self if value is not None}
        need = self.needs[self.rope_type]
        for name in need:
            if name not in given:
                raise ValueError(f"`rope_type` {self.rope_type} needs `{name}`; set it")
        common = {"rope_type", "rope_theta"}
        common |= {"original_max_position_embeddings"} if self.factor is not None else set()
        known = {*common, *need, *self.takes[self.rope_type]}
        for name in type(self).model_fields:
            if name in given - known:
                raise ValueError(
                    f"`rope_type` {self.rope_type} has no `{name}`; leave it out, it has "
                    f"{', '.join(sorted(known))}"
                )
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"`low_freq_factor` {low:g} must be less than `high_freq_factor` {high:g}"
            )
        return self


class FrozenModel(Section):
    """A model that is used but not trained."""

    places: ClassVar[tuple[str, ...]] = ("path", "from_scratch", "run")
    """The keys that identify the model; exactly one is set."""

    path: str | None = None
    """Folder or hub name of a model in the Hugging Face format."""
    from_scratch: TinyModel | None = None
    """Instead of `path`: a small model with random weights."""
    run: str | None = None
    """Instead of `path`: another run of this store, whose weights are used."""
    version: Int | None = Field(default=None, ge=0)
    """Policy version of that run; None: the newest one when this run starts, which is recorded."""
    digest: str | None = None
    """Expected digest of these weights; None: the recorded one."""
    chat_template: str | None = None
    """Jinja template that writes conversations, as text or as a file; None: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the chat template, such as `{enable_thinking: false}`.

    They become part of the template in published folders too, as defaults.
    """
    system_prompt: str | None = None
    """System message of conversations that have none; part of the template, not of `messages`."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model is run; only for code that you have read."""
    rope_parameters: RopeParameters | None = None
    """Scaling of its rotary position embeddings, wherever the model is used, and in published
    folders; None: as its `config.json` says."""
    tool_call_format: Literal["hermes", "llama", "mistral", "json"] = "hermes"
    """Format of its tool calls: `<tool_call>` as in Hermes and Qwen, after `<|python_tag|>` or as
    bare JSON, after `[TOOL_CALLS]`, or an answer that is only JSON."""
    reasoning_format: Literal["think", "magistral", "seed_oss"] | None = None
    """Tags of its thoughts, which messages then have as `reasoning_content` apart from `content`:
    `<think>` (DeepSeek-R1, Qwen3), `[THINK]` or `<seed:think>`; None: a thought is content.

    Rewards see the whole text. It is for chat templates that write `reasoning_content`.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights wherever the model is used but not trained.

    Of the policy: in engines and published versions. The trainer keeps float32 weights, since
    updates are often smaller than what bfloat16 can add; see `trainer.precision`.
    """
    attention: Attention = "sdpa"
    """Implementation of attention in the trainer; sdpa: or eager for a model without it.

    flash_attention needs its package, a GPU and bfloat16; flex_attention needs a GPU. Both, and
    sdpa, pack sequences; eager pads. Engines attend in their own way: transformers through its KV
    cache by sdpa, vLLM by the `attention_backend` in its `engine_args`.
    """
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$")
    """Device of the model: auto takes a GPU if there is one, cuda:1 the second GPU."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _names(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            if not name.isidentifier() or name in ("messages", "tools", "add_generation_prompt"):
                raise ValueError(
                    f"`{name}` cannot be set in a chat template; give names such as enable_thinking"
                )
        return given

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
            raise ValueError("has a `version` or `digest`, but no `run` that they belong to")
        return self


class ModelConfig(FrozenModel):
    """The model that a run starts from."""

    lora: LoraConfig | None = None
    """Train a low-rank adapter on top of the model; None: train the model itself."""
    router_replay: bool = False
    """Whether the trainer takes the experts that the engine chose for each token (R3,
    arXiv:2510.11370), which rows then have in `routed_experts`; for mixtures of experts."""
