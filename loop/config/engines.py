"""The engines that sample: transformers in this process, vLLM, SGLang, an endpoint, or Tinker."""

from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from ...operators.endpoint import Endpoint as ChatEndpoint
from ...operators.endpoint import is_loopback
from .base import Choice, Float, Int, Section
from .model import FrozenModel


class TransformersEngine(Section):
    """Transformers in this process, with continuous batching of requests."""

    max_requests: Int = Field(default=256, ge=1)
    """Most sequences sampled concurrently; others wait."""
    max_cache_tokens: Int = Field(default=1 << 20, ge=1)
    """Most tokens in the KV cache; requests that do not fit wait."""


class VllmEngine(Section):
    """vLLM in separate processes on this host."""

    engine_args: dict[str, Any] = Field(default={})
    """Arguments passed to vLLM unchanged, such as `{tensor_parallel_size: 2}`."""
    request_timeout: Float = Field(default=600.0, gt=0)
    """Timeout of one request, in seconds."""
    startup_timeout: Float = Field(default=600.0, gt=0)
    """Longest time until the engine is ready, in seconds."""
    max_restarts: Int = Field(default=3, ge=0)
    """Restarts after the engine died; requests in progress at that time are lost."""
    memory_share: Float | None = Field(default=None, gt=0, le=1)
    """Share of each GPU's memory for vLLM's weights, activations and KV cache; None: vLLM's 0.9.

    A trainer on the same GPU has the rest for its weights and optimizer, and for its steps, unless
    vLLM sleeps during these. vLLM's own name: `gpu_memory_utilization`.
    """
    sleep: bool = False
    """Whether vLLM frees its GPU memory when a batch is sampled, until the next request.

    Its weights wait in CPU memory (vLLM's sleep, level 1). For an explorer and a trainer that take
    turns on one GPU, so not with `schedule.streaming`, `schedule.max_ahead` or oversampling. On a
    CPU vLLM stops and goes on in the same way, and frees nothing.
    """
    verify_weights: Float = Field(default=1.0, ge=0, le=1)
    """Share of weight updates that are verified: the digest of what arrived is computed, and what
    the model multiplies with is compared with it. The first update is always verified."""
    merge_adapter: bool = False
    """Whether a LoRA adapter is merged into the base model for each version, in place of vLLM
    loading it as an adapter: updates take longer, and sampling is faster."""

    @model_validator(mode="after")
    def _split(self) -> Self:
        if self.memory_share is not None and "gpu_memory_utilization" in self.engine_args:
            raise ValueError(
                "has both `memory_share` and `gpu_memory_utilization` below `engine_args`, which "
                "are the same; set one of them"
            )
        if self.sleep and self.memory_share is None:
            raise ValueError(
                "has `sleep`, and no `memory_share`: vLLM would take 0.9 of a GPU that it shares "
                "with the trainer, whose weights and optimizer stay there; set `memory_share`"
            )
        return self


def _server_of(url: str) -> tuple[str, int, str]:
    """Return what two spellings of a server's address share: this machine has several names."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return "localhost" if is_loopback(host) else host, port, parts.path.rstrip("/")


class SglangEngine(Section):
    """SGLang servers that are running already, each started with the model of the run.

    With `schedule.weight_transport: store` they read weights from this machine's folders, so that
    a server on another machine needs the same path to them, on a shared file system. Otherwise, and
    for an adapter, which is merged, weights are broadcast to them.
    """

    urls: tuple[str, ...] = Field(min_length=1)
    """Addresses of the servers, such as `[http://127.0.0.1:30000]`; a request goes to the one with
    the fewest. Two jobs do not share a server: each has its own weights."""
    broadcast_backend: Literal["gloo", "nccl"] = "gloo"
    """How weights are broadcast to a server: gloo over TCP, or nccl between GPUs, for which this
    process has a GPU that no server uses."""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable that holds the servers' API key; if it is not set, no key is sent."""
    max_requests: Int = Field(default=256, ge=1)
    """Most requests at the servers concurrently; others wait."""
    request_timeout: Float = Field(default=600.0, gt=0)
    """Timeout of one request, and of one update of weights, in seconds."""
    restart_timeout: Float = Field(default=600.0, ge=0)
    """How long a server that cannot be reached is waited for, in seconds. One that was restarted is
    given the newest weights again, and its requests are repeated."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"must have addresses as `http://host:30000`, got {url!r}")
        if len({_server_of(url) for url in urls}) < len(urls):
            raise ValueError("has an address twice; name each server once")
        return urls


class Endpoint(ChatEndpoint, Section):
    """An external server that implements OpenAI's chat API."""

    processed_logprobs: bool = False
    """Whether its log-probs are at the sampling temperature, as those of rlake's server, and of
    vLLM with `--logprobs-mode processed_logprobs`. If not, they are of the unscaled distribution.

    Log-probs are stored only if they are of the full distribution at the temperature: processed
    ones without top_p, top_k and min_p, which vLLM applies first; others at temperature 1, or 0,
    where a row's log-probs are those at 1.
    """


class TinkerEngine(Section):
    """The server that trains the run's policy (`trainer.backend: tinker`) samples too.

    Versions say where their weights are. Log-probs are those at temperature 1, so that training
    samples at 1; evaluations may be greedy (0).
    """

    max_requests: Int = Field(default=64, ge=1)
    """Most requests at the server concurrently; others wait. With hundreds, SkyRL 0.3 with its
    SQLite database no longer answers in time."""
    request_timeout: Float = Field(default=600.0, gt=0)
    """Timeout of one request, in seconds; a first one may compile."""


class EngineConfig(Choice):
    """The inference engine: exactly one key is set, with its parameters."""

    noun: ClassVar[str] = "engine"

    transformers: TransformersEngine | None = None
    vllm: VllmEngine | None = None
    sglang: SglangEngine | None = None
    endpoint: Endpoint | None = None
    tinker: TinkerEngine | None = None

    @property
    def sleeps(self) -> bool:
        """Whether it frees its GPU memory while the trainer steps."""
        return self.vllm is not None and self.vllm.sleep


class OtherModel(FrozenModel):
    """An auxiliary model of workflows: a judge, a simulated user, a teacher."""

    places: ClassVar[tuple[str, ...]] = (*FrozenModel.places, "endpoint")

    endpoint: Endpoint | None = None
    """Instead of `path`: an OpenAI-compatible endpoint."""
    engine: EngineConfig = EngineConfig(transformers=TransformersEngine())
    """The inference engine for a model given by `path` or `run`."""
    temperature: Float = Field(default=0.0, ge=0)
    """Sampling temperature of its responses."""
    max_tokens: Int = Field(default=512, ge=1)
    """Most tokens of one response."""

    @model_validator(mode="after")
    def _has_engine(self) -> Self:
        if self.engine.endpoint is not None:
            raise ValueError("an `endpoint` replaces `path`; it does not go below `engine`")
        if self.engine.sleeps:
            raise ValueError("only the engine of an explorer has `sleep`; leave it out here")
        served = self.engine.vllm or self.engine.sglang
        if served is not None and self.path is None and self.run is None:
            raise ValueError("vLLM and SGLang serve the model of a `path` or of a `run`")
        return self


class SamplingConfig(Section):
    """How tokens are sampled.

    Stored log-probs are of the full distribution at `temperature`, as the trainer computes them.
    With `top_p`, `top_k` or `min_p` tokens are drawn from a truncated distribution, with
    penalties or `min_tokens` from a changed one: a policy gradient estimated from them is biased,
    because the ratios do not correct for that. DeepSeek-V3.2 (arXiv:2512.02556, section 3.1)
    applies the sampler's mask in training too; rlake does not. Train without these settings for an
    unbiased estimate. Each row records the settings that it was sampled with.
    """

    temperature: Float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: Float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens that have this total probability."""
    top_k: Int = Field(default=0, ge=0)
    """Sample from this many of the most likely tokens; 0: from all."""
    min_p: Float = Field(default=0.0, ge=0, le=1)
    """Sample from tokens whose probability is at least this share of the most likely token's."""
    max_tokens: Int = Field(default=64, ge=1)
    """Most tokens of one response; each turn of a conversation has this many."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""
    min_tokens: Int = Field(default=0, ge=0)
    """Fewest tokens of a response before its end token or a stop text."""
    ignore_eos: bool = False
    """Whether sampling continues after the end token, until `max_tokens` or a stop text."""
    repetition_penalty: Float = Field(default=1.0, gt=0, le=100)
    """Divides positive logits of tokens in prompt or response, and multiplies negative ones
    (arXiv:1909.05858); 1: none."""
    presence_penalty: Float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens that are in the response already."""
    frequency_penalty: Float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from a token's logit once for each time that it is in the response.

    In vLLM, responses in progress when new weights arrive count for this and for
    `presence_penalty` from there on only.
    """
    truncate_prompt_tokens: Int | None = Field(default=None, ge=1)
    """Keep this many of a prompt's last tokens; None: a prompt that is too long for the model is
    not answered, and its row has the finish reason `context_overflow`."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"`min_tokens` {self.min_tokens} is more than `max_tokens` {self.max_tokens}; "
                "set it to at most that"
            )
        return self
