"""Keep a sequence to a grammar, with xgrammar."""

from math import inf
from typing import TYPE_CHECKING, Any

import torch
import xgrammar
from torch import Tensor

from ...models.load import eos_id
from ..policy import PolicyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class GrammarCompiler:
    """Compiles grammars for the tokens of one model; xgrammar keeps those it compiled."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", vocabulary: int) -> None:
        """Take a tokenizer, and the number of logits of the model."""
        information = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary, stop_token_ids=[eos_id(tokenizer)]
        )
        self._end = eos_id(tokenizer)
        self._compiler = xgrammar.GrammarCompiler(information, max_threads=1)
        self._size = vocabulary

    def matcher(self, grammar: str) -> "GrammarMatcher":
        """Return a new matcher of a grammar; PolicyError if no token can begin its text."""
        made = GrammarMatcher(self._compiler.compile_structural_tag(grammar), self._size, self._end)
        if not made.allowed().any():
            raise PolicyError(
                "the model has no token that can begin what `response_format` or `tool_choice` "
                "asks for; leave it out, or take a model that can write JSON",
                finish_reason="invalid_request",
                param="response_format",
            )
        return made


class GrammarMatcher:
    """The state of one sequence in its grammar."""

    def __init__(self, compiled: Any, size: int, end: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, size)
        self._size, self._end, self._read = size, end, 0

    def allowed(self) -> Tensor:
        """Return which tokens can come next: [V]."""
        self._matcher.fill_next_token_bitmask(self._bits, 0)
        bits_WB = (self._bits[0][:, None] >> torch.arange(32)) & 1
        return bits_WB.flatten()[: self._size].bool()

    def mask(self, logits_V: Tensor, tokens: list[int]) -> Tensor:
        """Return logits without the tokens that cannot follow `tokens`."""
        for token in tokens[self._read :]:
            self._matcher.accept_token(token)
        self._read = len(tokens)
        allowed_V = self.allowed().to(logits_V.device)
        if not allowed_V.any():
            # The model lacks a character that must come: softmax of nothing but -inf is NaN.
            allowed_V[self._end] = True
        return logits_V.masked_fill(~allowed_V, -inf)
