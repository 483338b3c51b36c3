"""A sequence under way: its tokens, the weights that sampled them, and when it ends."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ..engine import Request, Sampled
from ..policy import Segment, Timing
from .logits import LogitsProcessor

if TYPE_CHECKING:
    from .grammar import GrammarMatcher

NOISE = 64
"""Most uniform numbers drawn at once."""
MARGIN = 16
"""Tokens decoded before a stop text, since some have no text."""

Text = Callable[[list[int]], str]
"""Decodes tokens."""


class Sequence:
    """One request's tokens, as far as they are sampled."""

    def __init__(self, request: Request, call: "Call", *, most: int) -> None:
        self.request, self.call = request, call
        self.prompt = tuple(request.prompt_ids)
        self.media = tuple(request.media)
        """The images of the prompt."""
        self.most = most
        """Most tokens of the answer."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        """None before its end."""
        self.is_gone = self.is_aborted = False
        """Whether its caller gave up, or asked for the tokens so far."""
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.routed_experts: list[list[int]] = []
        """The experts of the tokens that were read, if they are recorded."""
        self.matcher: GrammarMatcher | None = None
        self.processor: LogitsProcessor | None = None
        """Changes its logits; None: they are sampled from as they are."""
        self._writers: list[tuple[int, str | None]] = []
        """Version and digest of the weights of each segment."""
        self._sizes: list[int] = []
        """Tokens of each segment."""
        self._generator: torch.Generator | None = None
        self._noise: list[float] = []
        self._sent = perf_counter()
        self._begun = self._first = self._ended = 0.0

    @property
    def is_running(self) -> bool:
        """Whether sampling continues."""
        return not (self.finish_reason or self.is_gone or self.is_aborted)

    @property
    def length(self) -> int:
        """Tokens in the cache: all but the last sampled one, which the model reads next."""
        return len(self.prompt) + max(len(self.tokens) - 1, 0)

    @property
    def longest(self) -> int:
        """Most tokens with the prompt."""
        return len(self.prompt) + self.most

    def begin(self) -> None:
        """Note the time at which its sampling begins."""
        self._begun = perf_counter()

    def noise(self) -> float:
        """Return the uniform number for the next token; a function of the seed and its index."""
        if self.request.sampling.temperature == 0:
            return 0.0
        index = len(self.tokens) % NOISE
        if index == 0:
            if self._generator is None:
                self._generator = torch.Generator().manual_seed(self.request.sampling.seed)
            # no more than the answer may need: the numbers are the same
            number = max(1, min(NOISE, self.most - len(self.tokens)))
            drawn = torch.rand(number, generator=self._generator, dtype=torch.float64)
            self._noise = drawn.tolist()
        return self._noise[index]

    def add(
        self, token: int, logprob: float, writer: tuple[int, str | None], *, end: int, text: Text
    ) -> bool:
        """Append a token that a version of the weights (with its digest) sampled.

        Return whether it is the last one.
        """
        if not self.tokens:
            self._first = perf_counter()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        # By version and digest: a resumed run may publish other weights under the same version.
        if self._writers and self._writers[-1] == writer:
            self._sizes[-1] += 1
        else:
            self._writers.append(writer)
            self._sizes.append(1)
        how = self.request.sampling
        if (token == end and not how.ignore_eos) or (how.stop and self._stops(text)):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.most:
            self.finish_reason = "length"
        if self.request.on_tokens is not None:
            self.request.on_tokens((token,))
        return self.finish_reason is not None

    def _stops(self, text: Text) -> bool:
        stop, least = self.request.sampling.stop, self.request.sampling.min_tokens
        if len(self.tokens) <= least:
            return False
        # a character takes at most four tokens
        start = len(self.tokens) - 4 * max(map(len, stop)) - MARGIN
        end = text(self.tokens[max(start, least) :])
        return any(one in end for one in stop)

    def end(self) -> None:
        """Note the time of its end."""
        self._ended = perf_counter()
        self.finish_reason = self.finish_reason or "abort"

    def sampled(self) -> Sampled:
        """Return what was sampled."""
        now = self._ended or perf_counter()
        return Sampled(
            token_ids=self.tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.request.sampling.top_logprobs else None,
            routed_experts=self.routed_experts or None,
            finish_reason=self.finish_reason or "abort",
            segments=[
                Segment(policy_version=version, num_tokens=n, digest=digest)
                for (version, digest), n in zip(self._writers, self._sizes, strict=True)
            ],
            timing=Timing(
                queued=(self._begun or now) - self._sent,
                first_token=(self._first or now) - self._sent,
                total=now - self._sent,
            ),
        )


@dataclass(eq=False)
class Call:
    """The sequences of one call of `complete`."""

    future: asyncio.Future[list[Sampled]]
    sequences: list[Sequence]

    def answer(self) -> None:
        """Set the result once all sequences have ended."""
        if not self.future.done() and all(one.finish_reason for one in self.sequences):
            self.future.set_result([one.sampled() for one in self.sequences])

    def give_up(self) -> None:
        """Mark the sequences as dropped."""
        for one in self.sequences:
            one.is_gone = True
