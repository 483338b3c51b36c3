"""The Engine protocol: token ids in, token ids out, with weights that change while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..models.weights import Weights
from .policy import Sampling, Segment, Timing
from .token_stream import TokenCallback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to sample. Equal requests to equal weights give equal tokens."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    """With its own seed, and `max_tokens` that fit after the prompt."""
    media: Sequence[str] = ()
    """The ids of the images that stand in the prompt, in their order."""
    grammar: str | None = None
    """The structural tag of xgrammar that the tokens follow; see `grammars`."""
    on_tokens: TokenCallback | None = field(default=None, compare=False)
    """Receives the tokens while they are sampled; None: they are not streamed."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The answer to one request. Log-probs are in nats, of the full distribution at the sampling
    temperature, at 1 if that is 0."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    """stop, length or abort."""
    segments: Sequence[Segment]
    timing: Timing = field(default_factory=Timing)
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    """The `sampling.top_logprobs` likeliest tokens at each place, with their log-probs."""
    routed_experts: Sequence[Sequence[int]] | None = None
    """The experts of each token of prompt and answer but the last, layer by layer, if known."""


class Engine(Protocol):
    """Samples for many requests concurrently.

    All methods are called from one thread, in an event loop; another loop may follow after the
    first one ended. An engine bounds the requests that it runs, and queues the others.
    """

    name: str
    """The name in the column `engine` of rows: transformers, vllm."""
    tokenizer: "PreTrainedTokenizerFast"
    max_length: int | None
    """Most tokens of prompt and answer together."""

    @property
    def version(self) -> int:
        """The version of the weights that sample the next token."""
        ...

    @property
    def digest(self) -> str | None:
        """The digest of these weights, computed from the loaded tensors."""
        ...

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample for requests, and return the answers in the same order.

        A cancelled call drops its requests. The tokens that `on_tokens` received are always the
        beginning of the answer. Raises PolicyError if the engine died or exceeded its timeout.
        """
        ...

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests, by identity: they are answered with the tokens so far, as `abort`."""
        ...

    async def swap(self, weights: Weights) -> None:
        """Replace the weights between two tokens; requests under way continue with the new ones.

        Their KV cache is computed anew: with keys and values of the old weights, a log-prob would
        not be that of the weights which its segment names. Raises JobError if the weights are
        damaged or belong to another model; the old ones stay.
        """
        ...

    async def close(self) -> None:
        """Drop requests under way and free all resources."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine in processes of its own, which can free their memory."""

    async def sleep(self) -> None:
        """Free the GPU's memory until the next request or weights, if it is configured to."""
        ...
