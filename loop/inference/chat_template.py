"""Continue conversations by chat templates, without changing tokens that were sampled."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...store.image_parts import media_ids
from ...store.records import Message
from ..models.chat_tokenizer import arguments_of, with_values
from ..models.load import eos_id, ids_behind, plain, prompt_ids
from ..models.reasoning import is_open, split_reasoning
from ..models.tool_calls import assistant_message
from .messages import after, begins, is_begun
from .policy import Tools, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ..models.images import Images

# What the template writes after this answer, it writes after any answer.
_ANSWER = "what-was-answered-stands-here"
_MOST_TURNS = 4
"""Most earlier turns that are compared with a prompt, the longest first."""
# Each candidate is parsed, and an answer may contain the template's closing text many times.
_MOST_ENDS = 64


class Templates:
    """Writes prompts that begin with the tokens of earlier turns where possible."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        tool_call_format: str = "hermes",
        reasoning_format: str | None = None,
        images: "Images | None" = None,
    ) -> None:
        self._tokenizer, self._format, self._images = tokenizer, tool_call_format, images
        self._reasoning = reasoning_format
        self._special = set(tokenizer.all_special_ids)

    def prompt(
        self, messages: Sequence[Message], tools: Tools, earlier: Sequence[Turn]
    ) -> list[int]:
        """Return the tokens of a prompt, beginning with those of an earlier turn if possible.

        If the last message is the assistant's, the tokens end with it, so that the policy
        continues it.
        """
        exact = self.continued(messages, tools, earlier)
        if exact is not None:
            return exact
        if is_begun(messages):
            before = self.prompt(messages[:-1], tools, earlier)
            return before + self._ids(_content(messages[-1]))
        found = prompt_ids(self._tokenizer, self._writable(messages), tools=tools)
        return self._expanded(found, media_ids(messages))

    def continued(
        self, messages: Sequence[Message], tools: Tools, earlier: Sequence[Turn]
    ) -> list[int] | None:
        """Return the prompt of a conversation that continues the longest of earlier turns.

        None if it continues none of them, or if the template now writes them differently.
        """
        asked = list(messages)
        # Templates write the tools at the beginning, so with others no token can be kept.
        same = [turn for turn in earlier if list(turn.tools or []) == list(tools or [])]
        if is_begun(asked):
            return self._in_answer(same, asked)
        begun = [t for t in same if begins(t, asked) and len(after(t)) < len(asked)]
        for turn in sorted(begun, key=lambda t: -len(t.messages))[:_MOST_TURNS]:
            shown = media_ids(turn.messages)
            new = media_ids(asked)[len(shown) :]
            # In a row the first tokens of images are its images', so that none may be sampled
            # before one that is shown.
            if new and self._images is not None and self._images.is_sampled(_tokens(turn), shown):
                continue
            rest = self._rest(turn, asked, tools)
            if rest is not None:
                return [*_tokens(turn), *self._expanded(self._ids(rest), new)]
        return None

    def _expanded(self, token_ids: list[int], media: Sequence[str]) -> list[int]:
        return token_ids if self._images is None else self._images.expanded(token_ids, media)

    def _in_answer(self, earlier: Sequence[Turn], asked: list[Message]) -> list[int] | None:
        """Return the prompt of an answer that continues a cut earlier turn."""
        begun, eos = _content(asked[-1]), eos_id(self._tokenizer)
        for turn in reversed(earlier):
            whole, ids = after(turn), _tokens(turn)
            # An answer with its end token was not cut, so nothing continues it.
            if len(whole) != len(asked) or whole[:-1] != asked[:-1] or not ids or ids[-1] == eos:
                continue
            content = _content(whole[-1])
            if begun.startswith(content) and not whole[-1].get("tool_calls"):
                return [*ids, *self._ids(begun[len(content) :])]
        return None

    def _rest(self, turn: Turn, messages: list[Message], tools: Tools) -> str | None:
        """Return what the template writes after a turn's answer; None if it rewrites the turn."""
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
        # templates write an end token after the answer, or do not
        ids = list(turn.completion.token_ids or ())
        sampled = [ids, ids[:-1]] if ids[-1:] and ids[-1] in self._special else [ids]
        for answer in map(self._decoded, sampled):
            if tail.startswith(answer):
                return tail[len(answer) :]
        thinks = self._reasoning is not None and is_open(before, self._reasoning)
        return self._after_same(turn, tail, self._closing(asked, tools), thinks=thinks)

    def _after_same(self, turn: Turn, tail: str, closing: str, *, thinks: bool) -> str | None:
        """Return what follows an answer whose blanks or calls the template writes differently."""
        at, answer = tail.find(closing) if closing else -1, _bare(turn.completion.answer)
        for _ in range(_MOST_ENDS):
            if at < 0:
                return None
            thought, text = None, tail[:at]
            if self._reasoning is not None:
                thought, text = split_reasoning(text, self._reasoning, is_begun=thinks)
            read = assistant_message(text, turn.tools, tool_call_format=self._format)
            if _bare({**read, "reasoning_content": thought}) == answer:
                # An end token that was sampled is among the turn's tokens: it must not come twice.
                rest, last = tail[at:], list(turn.completion.token_ids or ())[-1:]
                return rest.removeprefix(self._decoded(last)) if last else rest
            at = tail.find(closing, at + 1)
        return None

    def _closing(self, asked: list[Message], tools: Tools) -> str:
        """Return what the template writes after the last answer."""
        text = self._text([*asked, {"role": "assistant", "content": _ANSWER}], tools)
        return text.rpartition(_ANSWER)[2]

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
        """Return messages as templates read them: arguments as values, no call without a name."""
        return [with_values(m, self._format) if m.get("tool_calls") else m for m in messages]

    def _ids(self, text: str) -> list[int]:
        return ids_behind(self._tokenizer, text)

    def _decoded(self, ids: Sequence[int]) -> str:
        # Cleaned up, the text would lack spaces that were sampled, and would not be found.
        return self._tokenizer.decode(  # type: ignore[return-value]
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _tokens(turn: Turn) -> list[int]:
    """Return a turn's prompt and answer; none if the engine reported none."""
    completion = turn.completion
    if completion.prompt_ids is None or completion.token_ids is None:
        return []
    return [*completion.prompt_ids, *completion.token_ids]


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def _bare(message: Message) -> tuple[str, str, list[Any]]:
    """Return a message's thought and content without blanks, and its calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    summary = [(call["name"], arguments_of(call)) for call in calls]
    thought = "".join(str(message.get("reasoning_content") or "").split())
    return thought, "".join(_content(message).split()), summary
