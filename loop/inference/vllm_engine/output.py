"""The answer to one request, assembled from the pieces between changes of weights."""

import json
from bisect import bisect_left
from collections.abc import Sequence
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
"""vLLM writes log-probs below this for minus infinity."""


@dataclass
class Answer:
    """The tokens of a request so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish_reason: str = "abort"
    pieces: int = 0
    began: float = field(default_factory=perf_counter)
    first_token: float = 0.0

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete."""
        is_full = len(self.token_ids) >= self.request.sampling.max_tokens
        return is_full or self.finish_reason != "abort"

    @property
    def rest(self) -> Sampling:
        """The sampling of the rest, with another seed: the same one would repeat its numbers."""
        sampling, done = self.request.sampling, len(self.token_ids)
        if not done:
            return sampling
        seed = int(content_id(sampling.seed, done, length=15), 16)
        least = max(sampling.min_tokens - done, 0)
        most = sampling.max_tokens - done
        return replace(sampling, max_tokens=most, min_tokens=least, seed=seed)

    @property
    def on_tokens(self) -> TokenCallback | None:
        """The callback for the rest; None if a stop text may still cut it, or it may begin anew."""
        may_be_cut = self.request.grammar or (self.pieces > 0 and self.request.sampling.stop)
        return None if may_be_cut else self.request.on_tokens

    def add(self, piece: PartialOutput) -> None:
        """Add the tokens of one set of weights. Raises PolicyError if they are invalid."""
        if len(piece.logprobs) != len(piece.token_ids) or not all(map(is_sane, piece.logprobs)):
            invalid = [p for p in piece.logprobs if not is_sane(p)][:1]
            raise PolicyError(
                f"vLLM returned an invalid answer: {len(piece.token_ids)} tokens, "
                f"{len(piece.logprobs)} log-probs {invalid or ''}"
            )
        for label, num_tokens in piece.spans:
            self._segment(label, num_tokens)
        if piece.token_ids and not self.token_ids:
            self.first_token = piece.first_token - self.began
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.top_logprobs += piece.top_logprobs
        self.finish_reason = piece.finish_reason
        self.pieces += 1

    def _segment(self, label: str, num_tokens: int) -> None:
        version, digest = json.loads(label) if label != "default" else (0, None)
        last = self.segments[-1] if self.segments else None
        # By both: a resumed run publishes some versions again, with other weights.
        if last is not None and (last.policy_version, last.digest) == (version, digest):
            self.segments[-1] = replace(last, num_tokens=last.num_tokens + num_tokens)
        elif num_tokens:
            self.segments.append(
                Segment(policy_version=version, num_tokens=num_tokens, digest=digest)
            )

    def sampled(self, tokenizer: PreTrainedTokenizerFast) -> Sampled:
        """Return the whole answer."""
        if self.pieces > 1 and self.request.sampling.stop:
            self._cut(tokenizer)
        return Sampled(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.request.sampling.top_logprobs else None,
            finish_reason=self.finish_reason,
            segments=self.segments,
            timing=Timing(first_token=self.first_token, total=perf_counter() - self.began),
        )

    def _cut(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Cut at a stop text: vLLM misses one that begins before the weights changed."""
        stops, least = self.request.sampling.stop, self.request.sampling.min_tokens

        def has_stop(end: int) -> bool:
            text = str(tokenizer.decode(self.token_ids[least:end], skip_special_tokens=True))
            return any(stop in text for stop in stops)

        # By bisection: a text that contains a stop text still does when it grows.
        end = bisect_left(range(len(self.token_ids) + 1), 1, key=has_stop)
        if end <= len(self.token_ids):
            self._end_at(end)

    def _end_at(self, end: int) -> None:
        del self.token_ids[end:], self.logprobs[end:], self.top_logprobs[end:]
        self.finish_reason = "stop"
        kept: list[Segment] = []
        for segment in self.segments:
            left = end - sum(one.num_tokens for one in kept)
            if left > 0:
                kept.append(replace(segment, num_tokens=min(left, segment.num_tokens)))
        self.segments = kept


def is_sane(logprob: float) -> bool:
    """Return whether a log-prob is a finite number and not vLLM's minus infinity."""
    return isfinite(logprob) and logprob > NONSENSE
