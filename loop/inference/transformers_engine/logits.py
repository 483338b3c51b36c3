"""Change a sequence's logits before its next token is sampled, as vLLM does, in its order."""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..policy import Sampling

if TYPE_CHECKING:
    from .grammar import GrammarMatcher


class LogitsProcessor:
    """The penalties, biases, least length and grammar of one sequence.

    It counts the tokens of prompt and answer as they come, so that a step does not read them all.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        *,
        end: int,
        matcher: "GrammarMatcher | None" = None,
    ) -> None:
        self._sampling, self._prompt, self._end = sampling, prompt, end
        self._matcher = matcher
        self._count_V: Tensor | None = None
        self._is_seen_V: Tensor | None = None
        self._counted = 0

    def __call__(self, logits_V: Tensor, tokens: list[int]) -> Tensor:
        """Return other logits for the token after `tokens`; the given ones stay as they are."""
        how = self._sampling
        made_V = logits_V.clone()
        if len(tokens) < how.min_tokens:
            made_V[self._end] = -inf
        for token, bias in how.logit_bias:
            made_V[token] += bias
        count_V, is_seen_V = self._count(logits_V, tokens)
        if how.repetition_penalty != 1:
            factor_V = torch.where(made_V > 0, 1 / how.repetition_penalty, how.repetition_penalty)
            made_V = torch.where(is_seen_V, made_V * factor_V, made_V)
        made_V -= how.frequency_penalty * count_V + how.presence_penalty * (count_V > 0)
        return made_V if self._matcher is None else self._matcher.mask(made_V, tokens)

    def _count(self, logits_V: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return how often each token is in the answer, and whether it is in answer or prompt."""
        if self._count_V is None or self._is_seen_V is None:
            self._count_V = torch.zeros_like(logits_V)
            self._is_seen_V = torch.zeros_like(logits_V, dtype=torch.bool)
            self._is_seen_V[torch.tensor(list(self._prompt), device=logits_V.device)] = True
        for token in tokens[self._counted :]:
            self._count_V[token] += 1
            self._is_seen_V[token] = True
        self._counted = len(tokens)
        return self._count_V, self._is_seen_V
