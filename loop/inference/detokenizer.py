"""What tokens say, told while they are sampled: never a part of a character."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_UNKNOWN = "\ufffd"
"""What stands for bytes that are no character, or only a part of one."""
_SOON = 8
"""So many undecided tokens are looked at again only when they are twice as many."""


class SpecialTokens:
    """Which tokens of a tokenizer say nothing by themselves."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(i for i, token in added.items() if token.special)
        """Those that are left out of a text."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids: Any = tokenizer.convert_tokens_to_ids(names)
        unknown: Any = tokenizer.unk_token_id
        self.bytes = frozenset(i for i in ids if i not in (None, unknown))
        """Those whose text depends on all such tokens beside them."""


class IncrementalDetokenizer:
    """Tells what tokens say, part by part; the parts are the beginning of what all of them say.

    What ends in an unfinished character is held back until it is decided. Only a few tokens are
    looked at each time, with those before them that were told last: what stands there may matter
    to how a tokenizer writes spaces.
    """

    def __init__(
        self,
        text: Callable[[Sequence[int]], str],
        *,
        special: Collection[int] = (),
        undecided: Collection[int] = (),
        ends_at_special: bool = False,
    ) -> None:
        """`special` tokens say nothing, and nothing is told behind one when it `ends_at_special`.

        Text that ends in an `undecided` token is held back.
        """
        self._text, self._special, self._undecided = text, special, undecided
        self._ends, self._is_ended = ends_at_special, False
        self._last: list[int] = []
        self._new: list[int] = []
        self._patience = 0

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return what may be told now that these tokens came."""
        for token in tokens:
            self._is_ended |= self._ends and token in self._special
            if not self._is_ended and token not in self._special:
                self._new.append(token)
        number = len(self._new)
        if not number or number < self._patience or self._new[-1] in self._undecided:
            return ""
        now = self._text([*self._last, *self._new])
        if now.endswith(_UNKNOWN):
            self._patience = 2 * number if number >= _SOON else 0
            return ""
        said = now[len(self._text(self._last)) :]
        self._last = self._new if said else [*self._last, *self._new]
        self._new, self._patience = [], 0
        return said
