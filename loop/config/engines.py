"""What samples: in this process, in a server of ours, or at an address."""

from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from .base import Choice, Float, Int, Section
from .model import FrozenModel


class TransformersEngine(Section):
    """In this process, on transformers: requests come and go in one running batch."""

    max_requests: Int = Field(default=256, ge=1)
    """Sequences sampled at once; more wait."""
    max_cache_tokens: Int = Field(default=1 << 20, ge=1)
    """Tokens of keys and values held at once; requests wait for room."""


class VllmEngine(Section):
    """vLLM, in this process or in a server that it starts."""

    server: bool = False
    """Whether it is a server of its own, asked over HTTP."""
    engine_args: dict[str, Any] = Field(default={})
    """What is handed to vLLM as it stands, as `{tensor_parallel_size: 2}`."""
    request_timeout: Float = Field(default=600.0, gt=0)
    """Longest time of one request."""
    startup_timeout: Float = Field(default=600.0, gt=0)
    """Longest time until it answers for the first time."""
    max_restarts: Int = Field(default=3, ge=0)
    """How often it is started again after it died; what was under way then is lost."""


class Endpoint(Section):
    """Anything that answers OpenAI's chat API."""

    url: str
    """As `https://host/v1`."""
    model: str
    """What it calls the model."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; one that is not set sends none."""
    timeout: Float = Field(default=120.0, gt=0)
    """Longest time of one request, its retries not counted."""
    max_retries: Int = Field(default=4, ge=0)
    """How often a request is sent again that was refused, or found nobody."""
    max_concurrency: Int = Field(default=32, ge=1)
    """Requests under way at once."""
    extra_body: dict[str, Any] = Field(default={})
    """What is added to each request's body as it stands; null takes a key out of it.

    `{return_token_ids: true}` asks vLLM for token ids; `{logprobs: null}` is for endpoints that
    refuse to give any.
    """
    processed_logprobs: bool = False
    """Whether its log-probs are at the sampling temperature, as rlake's server gives them, and
    vLLM's with `--logprobs-mode processed_logprobs`. If not, they are of the model's own
    distribution. They are kept only where they are of the full distribution at the temperature:
    processed ones without top_p, top_k and min_p, which vLLM applies first; others at temperature
    1, or 0, where a row's log-probs are those at 1.
    """

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"must be an address as `https://host/v1`, got {url!r}")
        if url.rstrip("/").endswith("/chat/completions"):
            raise ValueError("must be what stands before `/chat/completions`")
        return url


class EngineConfig(Choice):
    """One engine: the one key that is given, with its parameters."""

    noun: ClassVar[str] = "engine"

    transformers: TransformersEngine | None = None
    vllm: VllmEngine | None = None
    endpoint: Endpoint | None = None


class OtherModel(FrozenModel):
    """A model that workflows ask beside the policy: a judge, a user, a teacher."""

    places: ClassVar[tuple[str, ...]] = (*FrozenModel.places, "endpoint")

    endpoint: Endpoint | None = None
    """Instead of a path: where it answers."""
    engine: EngineConfig = EngineConfig(transformers=TransformersEngine())
    """What answers with the model of a path or a run."""
    temperature: Float = Field(default=0.0, ge=0)
    max_tokens: Int = Field(default=512, ge=1)

    @model_validator(mode="after")
    def _has_engine(self) -> Self:
        if self.engine.endpoint is not None:
            raise ValueError("an `endpoint` stands in place of a `path`, not below `engine`")
        if self.engine.vllm is not None and self.path is None and self.run is None:
            raise ValueError("vLLM serves the model of a `path` or of a `run`")
        return self


class SamplingConfig(Section):
    """How tokens are sampled.

    Stored log-probs are of the full distribution at `temperature`, which is what a trainer
    computes. With `top_p`, `top_k` or `min_p` the tokens are drawn from what is left of it after
    truncation: a policy gradient estimated from them is biased, since the tokens left out are never
    tried and the ratios do not correct for that. DeepSeek-V3.2 (arXiv:2512.02556, section 3.1)
    applies the sampler's mask in training too; rlake does not. Train without truncation where the
    estimate should be unbiased.
    """

    temperature: Float = Field(default=1.0, ge=0)
    top_p: Float = Field(default=1.0, gt=0, le=1)
    """The likeliest tokens with this much probability together are sampled from."""
    top_k: Int = Field(default=0, ge=0)
    """So many of the likeliest tokens are sampled from; 0: all."""
    min_p: Float = Field(default=0.0, ge=0, le=1)
    """Tokens that are at least this likely, relative to the likeliest, are sampled from."""
    max_tokens: Int = Field(default=64, ge=1)
    """Of one answer; a conversation of several turns has so many each."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
