"""Keep a sequence to a grammar, with xgrammar."""

from math import inf
from typing import TYPE_CHECKING, Any

import torch
import xgrammar
from torch import Tensor

from ...models.load import eos_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class GrammarCompiler:
    """Compiles grammars for the tokens of one model; xgrammar keeps those it compiled."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", vocabulary: int) -> None:
        """Take a tokenizer, and the number of logits of the model."""
        information = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary, stop_token_ids=[eos_id(tokenizer)]
        )
        self._compiler = xgrammar.GrammarCompiler(information, max_threads=1)
        self._size = vocabulary

    def matcher(self, grammar: str) -> "GrammarMatcher":
        """Return a new matcher of a grammar."""
        return GrammarMatcher(self._compiler.compile_structural_tag(grammar), self._size)


class GrammarMatcher:
    """The state of one sequence in its grammar."""

    def __init__(self, compiled: Any, size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, size)
        self._read = 0

    def mask(self, logits_V: Tensor, tokens: list[int]) -> Tensor:
        """Return logits without the tokens that cannot follow `tokens`."""
        for token in tokens[self._read :]:
            self._matcher.accept_token(token)
        self._read = len(tokens)
        self._matcher.fill_next_token_bitmask(self._bits, 0)
        words_W = self._bits[0]
        bits_WB = (words_W[:, None] >> torch.arange(32)) & 1
        allowed_V = bits_WB.flatten()[: len(logits_V)].bool().to(logits_V.device)
        return logits_V.masked_fill(~allowed_V, -inf)
