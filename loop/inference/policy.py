"""The Policy protocol: conversations in, completions with their tokens and log-probs out."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

from ...store.errors import JobError
from ...store.records import Message

FINISH_REASONS = {
    "stop": "the end token or a stop text was sampled",
    "length": "`sampling.max_tokens` were sampled, or the context was full",
    "tool_calls": "the policy called tools, and that was its last turn",
    "max_turns": "the conversation reached its most turns",
    "abort": "the request was cancelled; the tokens so far are kept",
    "timeout": "the rollout exceeded its timeout",
    "context_overflow": "the prompt left no room for an answer",
    "template_error": "the chat template refused the messages",
    "invalid_request": "the sampling settings do not fit the model",
    "unknown_tool": "the policy called a tool that does not exist",
    "malformed_arguments": "the arguments of a tool call were not JSON, or did not fit the tool",
    "tool_error": "a tool raised, or took too long",
    "engine_error": "the engine was down, slow, refused, or gave an invalid answer",
    "error": "the workflow raised, or returned something other than rows",
}
"""Why a completion or a rollout ended. A workflow may give another word."""
Tools = Sequence[dict[str, Any]] | None
"""The tools that a policy may call, in the form of chat APIs."""


class PolicyError(JobError):
    """A request that could not be answered; its row gets `finish_reason`.

    `param` is the setting that is wrong, if one is.
    """

    def __init__(
        self, message: str, *, finish_reason: str = "engine_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.finish_reason, self.param = finish_reason, param


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 1.0
    """0 is greedy. Log-probs are those of the full distribution at this temperature (at 1 if it
    is 0), whatever the other settings exclude or make likelier."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: all."""
    min_p: float = 0.0
    """Sample from tokens at least this likely, relative to the likeliest."""
    max_tokens: int = 64
    """Most tokens of one completion."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, of which they stay part."""
    min_tokens: int = 0
    """Fewest tokens before the end token or a stop text."""
    ignore_eos: bool = False
    """Whether sampling goes on after the end token."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by it, or multiplied where negative."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer contains."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the answer contains it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of tokens: pairs of a token and its bias."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last tokens; None: all."""
    json_schema: str | None = None
    """The JSON schema that the answer follows, as text; None: it is free."""
    forced_tools: tuple[str, ...] = ()
    """The tools of which the answer calls one; empty: it need not."""
    top_logprobs: int = 0
    """Likeliest tokens that are reported for each sampled one."""
    seed: int = 0
    """Every completion is a function of the weights, the prompt, the seed and its index."""

    def updated(self, **settings: Any) -> Self:
        """Return a copy with other values of some settings, faster than `dataclasses.replace`."""
        assert settings.keys() <= vars(self).keys(), settings
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **settings)
        return copy

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def is_processed(self) -> bool:
        """Whether logits are changed before sampling, other than by the temperature."""
        own = vars(self)  # asked for each request: `others` would take as long as to sample a token
        return any(own[name] != _DEFAULTS[name] for name in PROCESSING)

    @property
    def others(self) -> dict[str, Any]:
        """The settings without a column of their own that are not at their defaults."""
        return {
            name: value
            for name, default in _DEFAULTS.items()
            if (value := getattr(self, name)) != default
        }

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of rows sampled this way; greedy sampling truncates nothing."""
        cuts = self.temperature > 0
        return {
            "temperature": self.temperature,
            "top_p": self.top_p if cuts and self.top_p < 1 else None,
            "top_k": self.top_k if cuts and self.top_k > 0 else None,
            "min_p": self.min_p if cuts and self.min_p > 0 else None,
            "sampling": self.others or None,
        }


PROCESSING = (
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "json_schema",
    "forced_tools",
)
"""Settings that change logits before sampling; log-probs are of the unchanged ones."""
OTHERS = (*PROCESSING, "ignore_eos", "truncate_prompt_tokens")
"""Settings that rows record together, in the column `sampling`."""
_DEFAULTS = {f.name: f.default for f in fields(Sampling) if f.name in OTHERS}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens that one set of weights sampled."""

    policy_version: int
    num_tokens: int
    digest: str | None = None
    """Digest of the weights, as computed by the engine."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds from sending a request until it was started, its first token, and its end."""

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer. Its tokens are what was sampled; the text is derived from them."""

    text: str
    finish_reason: str
    """One of FINISH_REASONS."""
    message: Message | None = None
    """The answer as a message with its tool calls; None: the text is its content."""
    prompt_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None
    """The sampled tokens with the end token; None if the engine does not report them."""
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    """For each of token_ids the likeliest tokens with their log-probs, if they were requested."""
    routed_experts: Sequence[Sequence[int]] | None = None
    """The experts of each token of prompt_ids and token_ids but the last; None: not recorded."""
    logprobs: Sequence[float] | None = None
    """One for each of token_ids, in nats, of the full distribution at the sampling temperature."""
    sampling: Sampling | None = None
    """How it was sampled; None if the engine does not report it."""
    segments: Sequence[Segment] = ()
    """Which weights sampled how many tokens, in order."""
    policy_version: int | None = None
    """The version that sampled the first token, stamped when the request was sent."""
    engine: str | None = None
    """What answered: transformers, vllm, an address."""
    tokenizer: str | None = None
    """Digest of the tokenizer of token_ids, if known."""
    timing: Timing = field(default_factory=Timing)

    @property
    def answer(self) -> Message:
        """The answer as a message of the conversation."""
        return self.message or {"role": "assistant", "content": self.text}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request and its answer."""

    messages: Sequence[Message]
    completion: Completion
    tools: Tools = None


class Policy(Protocol):
    """A model that answers; it may have an attribute `sampling`: see `default_sampling`."""

    @property
    def version(self) -> int | None:
        """The optimizer step of the weights that would answer a request sent now.

        None for weights that rlake does not train, such as an endpoint's.
        """
        ...

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Tools = None,
        sampling: Sampling | None = None,
        earlier: Sequence[Turn] = (),
    ) -> list[Completion]:
        """Return `n` answers to one conversation.

        `earlier` are turns of the same conversation: where `messages` repeat them, their sampled
        tokens are used unchanged. Raises PolicyError.
        """
        ...


def default_sampling(policy: Policy) -> Sampling:
    """Return how a policy samples for requests that set nothing."""
    return getattr(policy, "sampling", None) or Sampling()
