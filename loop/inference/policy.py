"""What answers: the Policy protocol, its Completion, and the one fake that tests use."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...store.errors import JobError
from ...store.records import Message

FINISH_REASONS = {
    "stop": "the end token, or a text to stop at, was sampled",
    "length": "`sampling.max_tokens` were sampled, or the context was full",
    "tool_calls": "the policy called tools, and that was its last turn",
    "max_turns": "the conversation had as many turns as it may",
    "abort": "the request was stopped before its end; the tokens so far are kept",
    "timeout": "the try took longer than it may",
    "context_overflow": "the prompt left no room for an answer",
    "template_error": "the chat template refused the messages",
    "unknown_tool": "the policy called a tool that there is not",
    "malformed_arguments": "the policy called a tool with what is no JSON, or does not fit it",
    "tool_error": "a tool raised, or took too long",
    "engine_error": "the engine was down, slow, refused, or answered nonsense",
    "error": "the workflow raised, or returned what is no row",
}
"""Why a completion or a try ended. A workflow may give another word; these are ours."""


class PolicyError(JobError):
    """A request that could not be answered; `finish_reason` is the row's."""

    def __init__(self, message: str, *, finish_reason: str = "engine_error") -> None:
        super().__init__(message)
        self.finish_reason = finish_reason


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 1.0
    """0 takes the likeliest token. Log-probs are those of the full distribution at this
    temperature, at 1 where it is 0, whatever `top_p`, `top_k` and `min_p` leave out of it."""
    top_p: float = 1.0
    """The likeliest tokens that have this much probability together are sampled from."""
    top_k: int = 0
    """So many of the likeliest tokens are sampled from; 0: all."""
    min_p: float = 0.0
    """Tokens that are at least this likely, relative to the likeliest, are sampled from."""
    max_tokens: int = 64
    """Most tokens of one completion."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion when they are sampled; they stay part of it."""
    seed: int = 0
    """Every completion is a function of the weights, the prompt, the seed and its number."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def columns(self) -> dict[str, float | int | None]:
        """The columns of a row that was sampled so; greedy sampling has its temperature alone."""
        cuts = self.temperature > 0
        return {
            "temperature": self.temperature,
            "top_p": self.top_p if cuts and self.top_p < 1 else None,
            "top_k": self.top_k if cuts and self.top_k > 0 else None,
            "min_p": self.min_p if cuts and self.min_p > 0 else None,
        }


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens that one set of weights wrote, one after the other."""

    policy_version: int
    num_tokens: int
    digest: str | None = None
    """Of the weights, as the engine that served them says it."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a request."""

    queued: float = 0.0
    """Until it was worked on."""
    first_token: float = 0.0
    """From being sent until its first token."""
    total: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer, with what was sampled: tokens are the truth, text is derived."""

    text: str
    finish_reason: str
    """One of FINISH_REASONS."""
    message: Message | None = None
    """The answer as a message, with tool calls if any; None: the text is its content."""
    prompt_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None
    """The sampled tokens, the end token included; None when the engine gives none."""
    logprobs: Sequence[float] | None = None
    """One for each of token_ids, in nats, of the full distribution at the sampling temperature."""
    sampling: Sampling | None = None
    """How it was sampled; None when the engine does not say."""
    segments: Sequence[Segment] = ()
    """Which weights wrote how many tokens, in order."""
    policy_version: int | None = None
    """The version that wrote the first token, stamped when the request was sent."""
    engine: str | None = None
    """What answered: transformers, vllm, an address."""
    tokenizer: str | None = None
    """Digest of the tokenizer that token_ids are of; None when the engine does not say."""
    timing: Timing = field(default_factory=Timing)

    @property
    def answer(self) -> Message:
        """The answer as a message of the conversation."""
        return self.message or {"role": "assistant", "content": self.text}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request and its answer."""

    messages: Sequence[Message]
    """What was asked."""
    completion: Completion
    tools: Sequence[dict[str, Any]] | None = None


class Policy(Protocol):
    """A model that answers. `version` counts the optimizer steps behind its weights."""

    @property
    def version(self) -> int | None:
        """Optimizer steps behind the weights that a request sent now is answered with.

        None when they are none of ours, as an endpoint's.
        """
        ...

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        sampling: Sampling | None = None,
        earlier: Sequence[Turn] = (),
    ) -> list[Completion]:
        """Return `n` answers to one conversation.

        `earlier` are turns of the same conversation: what was sampled then stays as it was, token
        for token, where it stands in `messages` again. Raises PolicyError.
        """
        ...
