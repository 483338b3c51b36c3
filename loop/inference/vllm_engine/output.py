"""What vLLM sampled for one request, put together from the pieces between changes of weights."""

import json
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from math import isfinite
from time import perf_counter

from transformers import PreTrainedTokenizerFast

from ....store.ids import content_id
from ..engine import Request, Sampled
from ..policy import PolicyError, Sampling, Segment, Timing
from ..token_stream import TokenCallback
from .backend import PartialOutput

NONSENSE = -9000.0
"""Log-probs below this stand for infinity in vLLM's answers."""


@dataclass
class Answer:
    """What was sampled for a request so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish_reason: str = "abort"
    pieces: int = 0
    began: float = field(default_factory=perf_counter)
    first_token: float = 0.0

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to sample."""
        return self.finish_reason != "abort" or len(self.token_ids) >= self.most

    @property
    def most(self) -> int:
        """How many tokens it may have."""
        return self.request.sampling.max_tokens

    @property
    def rest(self) -> Sampling:
        """How the rest is sampled: with randomness of its own behind other weights' tokens."""
        sampling, done = self.request.sampling, len(self.token_ids)
        if not done:
            return sampling
        seed = int(content_id(sampling.seed, done, length=15), 16)
        return replace(sampling, max_tokens=self.most - done, seed=seed)

    @property
    def heard(self) -> TokenCallback | None:
        """Who may hear the rest as it comes: nobody, where it may yet be cut at a text."""
        may_be_cut = self.pieces > 0 and self.request.sampling.stop
        return None if may_be_cut else self.request.heard

    def add(self, piece: PartialOutput) -> None:
        """Add what was sampled by one set of weights; PolicyError when it is nonsense."""
        if len(piece.logprobs) != len(piece.token_ids) or not all(map(is_sane, piece.logprobs)):
            message = [p for p in piece.logprobs if not is_sane(p)][:1]
            raise PolicyError(
                f"vLLM answered nonsense: {len(piece.token_ids)} tokens, {len(piece.logprobs)} "
                f"log-probs {message or ''}"
            )
        for label, num_tokens in piece.spans:
            self._segment(label, num_tokens)
        if piece.token_ids and not self.token_ids:
            self.first_token = piece.first_token - self.began
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason
        self.pieces += 1

    def _segment(self, label: str, num_tokens: int) -> None:
        version, digest = json.loads(label) if label != "default" else (0, None)
        if self.segments and self.segments[-1].policy_version == version:
            num_tokens += self.segments.pop().num_tokens
        if num_tokens:
            made = Segment(policy_version=version, num_tokens=num_tokens, digest=digest)
            self.segments.append(made)

    def sampled(self, tokenizer: PreTrainedTokenizerFast) -> Sampled:
        """Return the whole answer."""
        if self.pieces > 1 and self.request.sampling.stop:
            self._cut(tokenizer)
        return Sampled(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            segments=self.segments,
            timing=Timing(first_token=self.first_token, total=perf_counter() - self.began),
        )

    def _cut(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """End where a text to stop at is: vLLM sees none that begins before the weights changed."""
        stops = self.request.sampling.stop

        def has_stop(end: int) -> bool:
            text = str(tokenizer.decode(self.token_ids[:end], skip_special_tokens=True))
            return any(stop in text for stop in stops)

        end = bisect_left(range(len(self.token_ids) + 1), 1, key=has_stop)
        if end <= len(self.token_ids):
            self._end_at(end)

    def _end_at(self, end: int) -> None:
        self.token_ids, self.logprobs, self.finish_reason = (
            self.token_ids[:end],
            self.logprobs[:end],
            "stop",
        )
        kept: list[Segment] = []
        for segment in self.segments:
            left = end - sum(one.num_tokens for one in kept)
            if left > 0:
                kept.append(replace(segment, num_tokens=min(left, segment.num_tokens)))
        self.segments = kept


def is_sane(logprob: float) -> bool:
    """Tell whether a log-prob is a number, and not one that stands for none."""
    return isfinite(logprob) and logprob > NONSENSE
