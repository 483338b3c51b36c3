"""Conversations as tokens: what assistants wrote is trained on, where the chat template allows."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.conversation import calls_of, is_answer, is_text, shared, text_of, why_untrainable
from ...store.errors import ConfigError, missing_extra
from ...store.files import Tokens
from ...store.records import Message
from .load import eos_id, ids_behind, plain, prompt_ids, tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

import json

from .tool_calls import of_text

BROKEN_PREFIX = "the chat template writes earlier turns anew"
REFUSED = "the chat template refuses the messages"
UNWRITTEN = "the chat template writes none of its assistant turns"
NOT_TEXT = "a message of it has parts that are no text"
_MARK = "\ue000what-was-answered-stands-here\ue000"

Tools = Sequence[dict[str, Any]] | None
Part = tuple[str, bool]
"""A stretch of a conversation as text, and whether an assistant wrote it."""


class ConversationTokenizer:
    """Makes tokens of conversations with the tokenizer of a model's folder."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, is_exact: bool = True) -> None:
        """Refuse conversations whose earlier turns the template writes anew, if it `is_exact`.

        Else such turns are trained on as they stand in the whole conversation.
        """
        self._tokenizer, self._is_exact = tokenizer, is_exact

    @property
    def digest(self) -> str:
        """Digest of the tokenizer."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return tokenizer_digest(self._tokenizer)

    def __call__(
        self, messages: Sequence[Message], tools: Tools, *, first: int = 0
    ) -> Tokens | str:
        """Return tokens, with a mask that is true where an assistant wrote; or why there are none.

        The tokens are those that a policy would have been asked with, and its answers, calls of
        tools included, with their end tokens. An earlier turn stands as the policy wrote it where
        the template writes it the same way once the talk went on; where it does not, no policy can
        have seen these tokens. Turns before the `first` message are not trained on.
        """
        why_not = why_untrainable(messages)
        if why_not is not None:
            return why_not
        try:
            talk = [_plain(m) for m in messages]
            return self._tokens(talk, list(tools) if tools else None, first)
        except _Untold as error:
            return str(error)
        except Exception:  # noqa: BLE001  templates are others' programs, and rows hold anything
            return REFUSED

    def _tokens(self, talk: list[Message], tools: Tools, first: int) -> Tokens:
        ids: list[int] = []
        mask: list[bool] = []
        for text, is_said in self._parts(talk, tools, first):
            found = self._ids(text) if ids else self._first_ids(text)
            ids += found
            mask += [is_said] * len(found)
        last, end = talk[-1], eos_id(self._tokenizer)
        if is_answer(last) and (not last.get("tool_calls") or ids[-1:] != [end]):
            ids.append(end)
            mask.append(True)
        if not any(mask):
            raise _Untold(UNWRITTEN)
        return Tokens(ids, mask)

    def _parts(self, talk: list[Message], tools: Tools, first: int) -> Iterator[Part]:
        """Cut the conversation where an assistant begins and ends."""
        is_text = is_answer(talk[-1]) and not talk[-1].get("tool_calls")
        body = talk[:-1] if is_text else talk
        whole = self._text(body, tools, ready=is_text)
        at = 0
        for place in (i for i, m in enumerate(body) if i >= first and is_answer(m)):
            start, end = self._span(whole, body, place, tools, ready=is_text)
            if at <= start < end:
                yield whole[at:start], False
                yield whole[start:end], True
                at = end
        if is_text:
            yield whole[at:], False
            yield talk[-1]["content"], True
        elif not is_answer(talk[-1]):
            yield whole[at:], False

    def _span(
        self, whole: str, talk: list[Message], place: int, tools: Tools, *, ready: bool
    ) -> tuple[int, int]:
        """Return where an assistant's turn begins and ends, its end token included."""
        if place:
            before = self._text(talk[:place], tools, ready=True)
            after = self._text(talk[: place + 1], tools)
            if whole.startswith(after) and after.startswith(before):
                return len(before), self._end(after, len(before))
        if self._is_exact:
            raise _Untold(BROKEN_PREFIX)
        return self._written(whole, talk, place, tools, ready=ready)

    def _written(
        self, whole: str, talk: list[Message], place: int, tools: Tools, *, ready: bool
    ) -> tuple[int, int]:
        """Find a turn by what changes in the whole when it is another; (0, 0) if nothing does."""
        other = [*talk[:place], {"role": "assistant", "content": _MARK}, *talk[place + 1 :]]
        text = self._text(other, tools, ready=ready)
        if _MARK not in text:
            return 0, 0
        start = shared(whole, text)
        same = shared(whole[start:][::-1], text[start:][::-1])
        end, last = len(whole) - same, str(self._tokenizer.eos_token)
        return start, end + len(last) if whole.startswith(last, end) else end

    def _text(self, messages: list[Message], tools: Tools, *, ready: bool = False) -> str:
        if self._tokenizer.chat_template is None:
            return plain(messages)
        return self._tokenizer.apply_chat_template(  # type: ignore[return-value]
            messages,  # type: ignore[arg-type]
            tools=tools,  # type: ignore[arg-type]
            add_generation_prompt=ready,
            tokenize=False,
        )

    def _first_ids(self, text: str) -> list[int]:
        if self._tokenizer.chat_template is None:  # a prompt may begin with a token of its own
            return prompt_ids(self._tokenizer, [{"content": text}])
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _ids(self, text: str) -> list[int]:
        return ids_behind(self._tokenizer, text)

    def _end(self, text: str, start: int) -> int:
        """Return where the last turn ends: behind its end token, where the template has one."""
        last = str(self._tokenizer.eos_token)
        end = text.rfind(last, start) + len(last)
        return end if end >= start + len(last) and not text[end:].strip() else len(text)


class _Untold(Exception):
    """A conversation has no tokens; the message says why."""


def _plain(message: Message) -> Message:
    """Return a message as chat templates take it: content is text, arguments are values."""
    content, calls = message.get("content"), calls_of(message)
    if not is_text(content):
        raise _Untold(NOT_TEXT)
    kept = {k: v for k, v in message.items() if k not in ("tool_calls", "function_call")}
    role = "tool" if message.get("role") == "function" else message.get("role")
    made = {**kept, "role": role, "content": text_of(content) or ""}
    return with_values({**made, "tool_calls": [*map(_call, calls)]}) if calls else made


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    message = {"name": function.get("name") or "", "arguments": function.get("arguments", {})}
    named = {"id": call["id"]} if call.get("id") else {}
    return {**named, "type": "function", "function": {**function, **message}}


def load_tokenizer(folder: str | Path) -> ConversationTokenizer:
    """Load the tokenizer of a folder in the Hugging Face format.

    Raises ConfigError when there is none, or one that has no end token.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_extra("transformers", "train") from error
    if not Path(folder).is_dir():
        raise ConfigError(f"`--tokenizer` {str(folder)!r} is no folder, expected one of a model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"`--tokenizer` {str(folder)!r} holds no tokenizer that can be loaded: "
            f"{str(error).splitlines()[0]}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {str(folder)!r} has no end token; set `eos_token`")
    return ConversationTokenizer(tokenizer)


def with_values(message: Message, tool_call_format: str = "hermes") -> Message:
    """Return a message that calls tools as templates take it: arguments that are JSON are values.

    A call that could not be read stands in the content, as the model wrote it.
    """
    calls, text = [], str(message.get("content") or "")
    for call in message["tool_calls"]:
        function = call["function"]
        if function["name"]:
            calls.append({**call, "function": {**function, "arguments": arguments_of(function)}})
        else:
            text += of_text(str(function["arguments"]), tool_call_format=tool_call_format)
    rest = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**rest, "content": text} | ({"tool_calls": calls} if calls else {})


def arguments_of(function: dict[str, Any]) -> Any:
    """Return arguments as templates take them: an object, or text where they are none."""
    try:
        value = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        return function["arguments"]
    return value if isinstance(value, dict) else function["arguments"]
