"""What an engine is: tokens in, tokens out, with weights that can be replaced while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..models.weights import Weights
from .policy import Sampling, Segment, Timing
from .token_stream import TokenCallback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to be sampled. Equal requests to equal weights give equal tokens."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    """With a seed of its own, and `max_tokens` that fit behind the prompt."""
    heard: TokenCallback | None = field(default=None, compare=False)
    """Takes the tokens of the answer while they are sampled, if somebody waits for them."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What was sampled for one request; log-probs in nats, of the full distribution at the
    sampling temperature, at 1 where that is 0."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    """stop, length or abort."""
    segments: Sequence[Segment]
    timing: Timing = field(default_factory=Timing)


class Engine(Protocol):
    """Samples for many requests at once.

    All methods are called from one thread, in an event loop; another loop may follow when the
    first one ended. An engine bounds what it works on at once, and lets the others wait.
    """

    name: str
    """What rows say answered: transformers, vllm."""
    tokenizer: "PreTrainedTokenizerFast"
    max_length: int | None
    """Most tokens of prompt and answer together."""

    @property
    def version(self) -> int:
        """The version of the weights that the next token is sampled with."""
        ...

    @property
    def digest(self) -> str | None:
        """The digest of these weights, worked out from what is loaded."""
        ...

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        """Sample for requests, in their order; when it is cancelled, they are given up.

        What a request's `heard` was given until then is how its answer begins.

        Raises PolicyError when the engine died, or gave nothing in time.
        """
        ...

    def abort(self, requests: Sequence[Request]) -> None:
        """End requests now, by identity: they are answered with what they have, as `abort`."""
        ...

    async def swap(self, weights: Weights) -> None:
        """Replace the weights between two tokens; requests under way go on with the new ones.

        Their keys and values are worked out again, so that each token's log-prob is that of the
        weights which its segment names. Raises JobError when the weights are damaged or of another
        model; then the old ones stay.
        """
        ...

    async def close(self) -> None:
        """Give up what is under way, and free what the engine holds."""
        ...
