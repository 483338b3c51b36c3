"""Chat templates that write a conversation on, behind tokens that stay as they were sampled."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...store.records import Message
from ..models.chat_tokenizer import arguments_of, with_values
from ..models.load import eos_id, ids_behind, plain, prompt_ids
from ..models.tool_calls import assistant_message
from .messages import after, begins, is_begun
from .policy import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ANSWER = "what-was-answered-stands-here"
_TURNS_LOOKED_AT = 4
"""Earlier turns that a prompt is tried behind, the longest first."""
_PLACES_LOOKED_AT = 64

Tools = Sequence[dict[str, Any]] | None


class Templates:
    """Writes prompts that begin with what was asked and sampled before."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", *, tool_call_format: str = "hermes"
    ) -> None:
        self._tokenizer, self._format = tokenizer, tool_call_format

    def prompt(
        self, messages: Sequence[Message], tools: Tools, earlier: Sequence[Turn]
    ) -> list[int]:
        """Return the tokens that a policy is asked with.

        They begin with those of an earlier turn where they can. When the last message is the
        assistant's, they end with it, for the policy to go on.
        """
        exact = self.continued(messages, tools, earlier)
        if exact is not None:
            return exact
        if is_begun(messages):
            before = self.prompt(messages[:-1], tools, earlier)
            return before + self._ids(_content(messages[-1]))
        return prompt_ids(self._tokenizer, self._writable(messages), tools=tools)

    def continued(
        self, messages: Sequence[Message], tools: Tools, earlier: Sequence[Turn]
    ) -> list[int] | None:
        """Return the prompt of a conversation that goes on behind the longest of earlier turns.

        None when none of them is its beginning, or the template writes them another way now.
        """
        asked = list(messages)
        same = [turn for turn in earlier if list(turn.tools or []) == list(tools or [])]
        if is_begun(asked):
            return self._within(same, asked)
        begun = [t for t in same if begins(t, asked) and len(after(t)) < len(asked)]
        for turn in sorted(begun, key=lambda t: -len(t.messages))[:_TURNS_LOOKED_AT]:
            rest = self._rest(turn, asked, tools)
            if rest is not None:
                return [*_tokens(turn), *self._ids(rest)]
        return None

    def _within(self, earlier: Sequence[Turn], asked: list[Message]) -> list[int] | None:
        """Return the prompt of an answer that goes on where an earlier turn was cut."""
        begun, eos = _content(asked[-1]), eos_id(self._tokenizer)
        for turn in reversed(earlier):
            said, ids = after(turn), _tokens(turn)
            if len(said) != len(asked) or said[:-1] != asked[:-1] or not ids or ids[-1] == eos:
                continue
            content = _content(said[-1])
            if begun.startswith(content) and not said[-1].get("tool_calls"):
                return [*ids, *self._ids(begun[len(content) :])]
        return None

    def _rest(self, turn: Turn, messages: list[Message], tools: Tools) -> str | None:
        """Return what the template writes behind a turn's answer; None: it writes it anew."""
        if not _tokens(turn):
            return None
        asked, begun = list(turn.messages), ""
        if is_begun(asked):
            begun = _content(asked.pop())
        before = self._text(asked, tools, ready=True) + begun
        whole = self._text(messages, tools, ready=True)
        if not whole.startswith(before):
            return None
        tail = whole[len(before) :]
        for said in self._as_sampled(turn):
            if tail.startswith(said):
                return tail[len(said) :]
        return self._behind_same(turn, tail, self._closing(asked, tools))

    def _as_sampled(self, turn: Turn) -> list[str]:
        """Return what was sampled as text, with the token that ended it and without."""
        ids = list(turn.completion.token_ids or ())
        special = set(self._tokenizer.all_special_ids)
        texts = [ids, ids[:-1]] if ids and ids[-1] in special else [ids]
        return [self._decoded(one) for one in texts]

    def _behind_same(self, turn: Turn, tail: str, closing: str) -> str | None:
        """Return what follows an answer that is written with other blanks, or its calls anew."""
        place = tail.find(closing) if closing else -1
        for _ in range(_PLACES_LOOKED_AT):
            if place < 0:
                return None
            if self._says(tail[:place], turn):
                rest, last = tail[place:], list(turn.completion.token_ids or ())[-1:]
                return rest.removeprefix(self._decoded(last)) if last else rest
            place = tail.find(closing, place + 1)
        return None

    def _says(self, written: str, turn: Turn) -> bool:
        """Tell whether a text is a turn's answer, read as the answer was."""
        answer = turn.completion.answer
        read = assistant_message(written, turn.tools, tool_call_format=self._format)
        return _bare(read) == _bare(answer)

    def _closing(self, asked: list[Message], tools: Tools) -> str:
        """Return what the template writes behind the last answer."""
        said = self._text([*asked, {"role": "assistant", "content": _ANSWER}], tools)
        return said.rpartition(_ANSWER)[2]

    def _text(self, messages: Sequence[Message], tools: Tools, *, ready: bool = False) -> str:
        if self._tokenizer.chat_template is None:
            return plain(messages)
        return self._tokenizer.apply_chat_template(  # type: ignore[return-value]
            self._writable(messages),  # type: ignore[arg-type]
            tools=list(tools) if tools else None,  # type: ignore[arg-type]
            add_generation_prompt=ready,
            tokenize=False,
        )

    def _writable(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as templates take them: arguments are values, no call lacks a name."""
        return [with_values(m, self._format) if m.get("tool_calls") else m for m in messages]

    def _ids(self, text: str) -> list[int]:
        return ids_behind(self._tokenizer, text)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(  # type: ignore[return-value]
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _tokens(turn: Turn) -> list[int]:
    """Return a turn's prompt and answer; none where the engine gave none."""
    completion = turn.completion
    if completion.prompt_ids is None or completion.token_ids is None:
        return []
    return [*completion.prompt_ids, *completion.token_ids]


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def _bare(message: Message) -> tuple[str, list[Any]]:
    """Return what a message says without blanks, and what it calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    summary = [(call["name"], arguments_of(call)) for call in calls]
    return "".join(_content(message).split()), summary
