"""Incremental detokenization: text of tokens while they are sampled, in whole characters."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_UNKNOWN = "\ufffd"
"""Stands for bytes that are not a character, or only a part of one."""
_SOON = 8
"""This many undecided tokens are decoded again only when there are twice as many."""


class SpecialTokens:
    """The tokens of a tokenizer that have no text of their own."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(i for i, token in added.items() if token.special)
        """Those that are left out of a text."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids: Any = tokenizer.convert_tokens_to_ids(names)
        unknown: Any = tokenizer.unk_token_id
        self.bytes = frozenset(i for i in ids if i not in (None, unknown))
        """Those whose text depends on neighboring tokens of this kind."""


class IncrementalDetokenizer:
    """Returns the text of tokens part by part; the parts are the beginning of the whole text.

    An unfinished character is held back until it is decided. Each call decodes only a few tokens:
    the new ones, and those of the last part, on which the spaces of some tokenizers depend.
    """

    def __init__(
        self,
        text: Callable[[Sequence[int]], str],
        *,
        special: Collection[int] = (),
        undecided: Collection[int] = (),
        ends_at_special: bool = False,
    ) -> None:
        """Skip `special` tokens, or end at the first one if `ends_at_special`.

        Text that ends in an `undecided` token is held back.
        """
        self._text, self._special, self._undecided = text, special, undecided
        self._ends, self._is_ended = ends_at_special, False
        self._last: list[int] = []
        self._new: list[int] = []
        self._patience = 0

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        for token in tokens:
            self._is_ended |= self._ends and token in self._special
            if not self._is_ended and token not in self._special:
                self._new.append(token)
        number = len(self._new)
        if not number or number < self._patience or self._new[-1] in self._undecided:
            return ""
        both = [*self._last, *self._new]
        now = self._text(both)
        if now.endswith(_UNKNOWN):
            self._patience = 2 * number if number >= _SOON else 0
            return ""
        part = now[len(self._text(self._last)) :]
        # Tokens without a text stay, so that the context of the next ones begins with a text.
        self._last = self._new if part else both
        self._new, self._patience = [], 0
        return part
