"""Tokenize conversations, with a mask over the assistant's tokens."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.conversation import calls_of, is_answer, is_text, shared, text_of, why_untrainable
from ...store.errors import ConfigError, missing_extra
from ...store.files import Tokens
from ...store.image_parts import media_ids
from ...store.records import Message
from .load import eos_id, ids_behind, plain, prompt_ids, tokenizer_digest
from .tool_calls import of_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .images import Images

BROKEN_PREFIX = "the chat template writes earlier turns anew"
REFUSED = "the chat template refuses the messages"
UNWRITTEN = "the chat template writes none of its assistant turns"
NOT_TEXT = "a message of it has parts that are no text"
# Private-use characters, which neither templates nor real texts contain.
_MARK = "\ue000answer\ue000"

Tools = Sequence[dict[str, Any]] | None
Part = tuple[str, bool]
"""A stretch of a conversation as text, and whether an assistant wrote it."""


class ConversationTokenizer:
    """Tokenizes conversations with the tokenizer of a model's folder."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        is_exact: bool = True,
        images: "Images | None" = None,
    ) -> None:
        """If `is_exact`, refuse conversations whose earlier turns the template rewrites.

        Else such turns are trained on as they are rendered in the whole conversation. Without
        `images`, conversations with images are refused.
        """
        self._tokenizer, self._is_exact, self._images = tokenizer, is_exact, images

    @cached_property
    def digest(self) -> str:
        """Digest of the tokenizer."""
        return tokenizer_digest(self._tokenizer)

    def __call__(
        self, messages: Sequence[Message], tools: Tools, *, first: int = 0
    ) -> Tokens | str:
        """Return tokens, with a mask that is true for an assistant's; or why there are none.

        The tokens are the prompts that a policy would have been given, and its answers and tool
        calls with their end tokens. If the template renders an earlier turn differently once the
        conversation continues, no policy can have seen these tokens. Turns before the `first`
        message are not trained on.
        """
        why_not = why_untrainable(messages)
        if why_not is not None:
            return why_not
        try:
            shows = self._images is not None
            conversation = [_plain(m, shows_images=shows) for m in messages]
            found = self._tokens(conversation, list(tools) if tools else None, first)
            return found if self._images is None else _expanded(found, messages, self._images)
        except _NotTokenized as error:
            return str(error)
        except Exception:  # noqa: BLE001  a template is a program of its own, and rows hold anything
            return REFUSED

    def _tokens(self, conversation: list[Message], tools: Tools, first: int) -> Tokens:
        ids: list[int] = []
        mask: list[bool] = []
        for text, is_assistant in self._parts(conversation, tools, first):
            found = ids_behind(self._tokenizer, text) if ids else self._first_ids(text)
            ids += found
            mask += [is_assistant] * len(found)
        last, end = conversation[-1], eos_id(self._tokenizer)
        if is_answer(last) and (not _is_written(last) or ids[-1:] != [end]):
            ids.append(end)
            mask.append(True)
        if not any(mask):
            raise _NotTokenized(UNWRITTEN)
        return Tokens(ids, mask)

    def _parts(self, conversation: list[Message], tools: Tools, first: int) -> Iterator[Part]:
        """Split the conversation at the beginning and end of each assistant turn."""
        is_text = is_answer(conversation[-1]) and not _is_written(conversation[-1])
        body = conversation[:-1] if is_text else conversation
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
            yield conversation[-1]["content"], True
        elif not is_answer(conversation[-1]):
            yield whole[at:], False

    def _span(
        self, whole: str, conversation: list[Message], place: int, tools: Tools, *, ready: bool
    ) -> tuple[int, int]:
        """Return the offsets of an assistant's turn, with its end token."""
        if place:
            before = self._text(conversation[:place], tools, ready=True)
            after = self._text(conversation[: place + 1], tools)
            if whole.startswith(after) and after.startswith(before):
                return len(before), self._end(after, len(before))
        if self._is_exact:
            raise _NotTokenized(BROKEN_PREFIX)
        return self._written(whole, conversation, place, tools, ready=ready)

    def _written(
        self, whole: str, conversation: list[Message], place: int, tools: Tools, *, ready: bool
    ) -> tuple[int, int]:
        """Locate a turn by what changes in the text if it is replaced; (0, 0) if nothing does."""
        other = [
            *conversation[:place],
            {"role": "assistant", "content": _MARK},
            *conversation[place + 1 :],
        ]
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
        if self._tokenizer.chat_template is None:  # the tokenizer may add a first token
            return prompt_ids(self._tokenizer, [{"content": text}])
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _end(self, text: str, start: int) -> int:
        """Return the end of the last turn: after its end token, if the template writes one."""
        last = str(self._tokenizer.eos_token)
        end = text.rfind(last, start) + len(last)
        return end if end >= start + len(last) and not text[end:].strip() else len(text)


def _is_written(answer: Message) -> bool:
    """Return whether an answer is more than text, so that the template writes it."""
    return bool(answer.get("tool_calls") or answer.get("reasoning_content"))


class _NotTokenized(Exception):
    """A conversation has no tokens; the message says why."""


def _expanded(found: Tokens, messages: Sequence[Message], images: "Images") -> Tokens:
    """Return tokens with as many for each image as it takes; none of them is trained on."""
    ids = images.expanded(found.token_ids, media_ids(messages))
    own = iter(found.loss_mask)
    mask: list[bool] = []
    for token, before in zip(ids, [None, *ids], strict=False):
        # images are apart from each other, by the tokens that begin and end one
        is_more = token == before == images.token_id
        mask.append(False if is_more else next(own) and token != images.token_id)
    return Tokens(ids, mask)


def _plain(message: Message, *, shows_images: bool = False) -> Message:
    """Return a message as chat templates expect it: content is text, arguments are values."""
    content, calls = message.get("content"), calls_of(message)
    if shows_images and media_ids([message]) and not calls:
        return dict(message)
    if not is_text(content):
        raise _NotTokenized(NOT_TEXT)
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

    Raises ConfigError if it has none, or one without an end token.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_extra("transformers", "train") from error
    if not Path(folder).is_dir():
        raise ConfigError(f"`--tokenizer` {str(folder)!r} is not a folder; name that of a model")
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
    """Return a message with tool calls as templates expect it: JSON arguments become values.

    A call that could not be parsed is part of the content, as the model wrote it.
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
    """Return arguments as templates expect them: an object, or text if they are not one."""
    try:
        value = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        return function["arguments"]
    return value if isinstance(value, dict) else function["arguments"]
