"""What answers: the Policy protocol, its Completion, and the one fake that tests use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..store.records import Message


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 1.0
    """0 takes the likeliest token; log-probs are those of the distribution sampled from."""
    max_tokens: int = 64
    """Most tokens of one completion."""
    seed: int = 0
    """Every completion is a function of the weights, the prompt, the seed and its number."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer, with what was sampled: tokens are the truth, text is derived."""

    text: str
    finish_reason: str
    """stop (the end token was sampled) or length."""
    prompt_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None
    """The sampled tokens, the end token included; None when the engine gives none."""
    logprobs: Sequence[float] | None = None
    """One for each of token_ids, in nats, at the temperature sampled with."""
    policy_version: int | None = None
    """The version that wrote the first token, stamped when the request was sent."""
    segments: Sequence[dict[str, int]] = field(default_factory=list)
    """How many tokens each version wrote, in order."""


class Policy(Protocol):
    """A model that answers. `version` counts the optimizer steps behind its weights."""

    @property
    def version(self) -> int:
        """Optimizer steps behind the weights that a request sent now is answered with."""
        ...

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        sampling: Sampling | None = None,
    ) -> list[Completion]:
        """Return `n` answers to one conversation."""
        ...


class ScriptedPolicy:
    """Answers from a function or a list, with made-up tokens: one for each character.

    >>> import asyncio
    >>> policy = ScriptedPolicy(lambda messages, i: "4" if i == 0 else "5")
    >>> [c.text for c in asyncio.run(policy.generate([{"role": "user", "content": "2+2="}], n=2))]
    ['4', '5']
    """

    def __init__(
        self, answers: Callable[[Sequence[Message], int], str] | Sequence[str], *, version: int = 0
    ) -> None:
        self._answers = answers
        self._asked = 0
        self.version = version

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        sampling: Sampling | None = None,
    ) -> list[Completion]:
        """Return the scripted answers."""
        return [self._complete(messages, i) for i in range(n)]

    def _complete(self, messages: Sequence[Message], i: int) -> Completion:
        if callable(self._answers):
            text = self._answers(messages, i)
        else:
            text = self._answers[self._asked % len(self._answers)]
            self._asked += 1
        tokens = [ord(c) for c in text] + [0]
        return Completion(
            text=text,
            finish_reason="stop",
            prompt_ids=[ord(c) for m in messages for c in str(m["content"])],
            token_ids=tokens,
            logprobs=[-0.5] * len(tokens),
            policy_version=self.version,
            segments=[{"policy_version": self.version, "num_tokens": len(tokens)}],
        )
