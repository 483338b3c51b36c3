"""Read what was sampled after a prompt: its thought, its content, and its tool calls."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...store.records import Message
from ..models.reasoning import FORMATS, ReasoningStream, is_open, split_reasoning
from ..models.tool_calls import OutsideToolCalls, assistant_message
from .detokenizer import IncrementalDetokenizer, SpecialTokens
from .policy import Tools
from .token_stream import TextDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LAST = 16
"""Tokens of a prompt's end in which a template may have begun a thought."""


class AnswerReader:
    """Reads the answers to one prompt."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        special: SpecialTokens,
        *,
        tools: Tools,
        tool_call_format: str,
        reasoning_format: str | None,
        prompt: Sequence[int],
    ) -> None:
        self._tokenizer, self._tools, self._format = tokenizer, tools, tool_call_format
        self._reasoning, self._bytes, self._left_out = (
            reasoning_format,
            special.bytes,
            special.special,
        )
        self._is_begun = False
        if reasoning_format is not None:
            # in some vocabularies the tags are special tokens, which are no part of texts
            tags = map(tokenizer.convert_tokens_to_ids, FORMATS[reasoning_format])
            self._left_out -= {tag for tag in tags if isinstance(tag, int)}
            self._is_begun = is_open(self._decoded(prompt[-_LAST:]), reasoning_format)

    def message(self, token_ids: Sequence[int]) -> Message | None:
        """Return an answer as a message; None if its text is its content."""
        if not self._tools and self._reasoning is None:
            return None
        thought, content = self._split(self._text(token_ids))
        own: Message = {} if thought is None else {"reasoning_content": thought}
        kept = list(token_ids)
        # With special tokens kept, the end token has a text, which would become content.
        if kept[-1:] == [self._tokenizer.eos_token_id]:
            kept.pop()
        _, marked = self._split(self._decoded(kept))
        read = assistant_message(marked, self._tools, tool_call_format=self._format)
        # An answer without a call reads as it does where no tools are given.
        return (read if read.get("tool_calls") else {**read, "content": content}) | own

    def decoder(self) -> TextDecoder:
        """Return what makes text of an answer's tokens while they are sampled."""
        # Formats mark calls with special tokens, so with tools the content ends at the first one.
        text = IncrementalDetokenizer(
            self._text,
            special=self._left_out,
            undecided=self._bytes,
            ends_at_special=bool(self._tools),
        )
        content = OutsideToolCalls(self._format) if self._tools else str
        if self._reasoning is None:
            return (lambda tokens: content(text(tokens))) if self._tools else text
        split = ReasoningStream(self._reasoning, is_begun=self._is_begun, content=content)
        return lambda tokens: split(text(tokens))

    def _split(self, text: str) -> tuple[str | None, str]:
        if self._reasoning is None:
            return None, text
        return split_reasoning(text, self._reasoning, is_begun=self._is_begun)

    def _text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones other than tags."""
        return self._decoded([token for token in token_ids if token not in self._left_out])

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)  # type: ignore[return-value]
