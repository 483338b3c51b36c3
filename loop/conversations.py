"""Conversations as tokens: what assistants wrote is trained on, where the chat template allows."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store.errors import ConfigError, missing_extra
from ..store.files import Tokens
from ..store.records import Message
from .models import eos_id, prompt_ids, response_ids, tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NO_ANSWER = "no answer at the end"
BROKEN_PREFIX = "the chat template writes earlier turns anew"
REFUSED = "the chat template refuses the messages"


class ConversationTokenizer:
    """Makes tokens of conversations with the tokenizer of a model's folder."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self.digest = tokenizer_digest(tokenizer)

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> Tokens | str:
        """Return tokens, with a mask that is true where an assistant wrote; or why there are none.

        The tokens are those that a policy would have been asked with, and its last answer with its
        end token. An earlier turn is trained on when the template writes it the same way once the
        talk went on; when it does not, no policy can have seen these tokens, and there are none.
        """
        if not messages or messages[-1].get("role") != "assistant":
            return NO_ANSWER
        try:
            return self._tokens(list(messages), list(tools) if tools else None)
        except Exception:  # noqa: BLE001  templates are others' programs, and rows hold anything
            return REFUSED

    def _tokens(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Tokens | str:
        ids, start = self._whole(messages, tools)
        mask = [False] * start + [True] * (len(ids) - start)
        for place, message in enumerate(messages[:-1]):
            if message.get("role") != "assistant":
                continue
            before = prompt_ids(self._tokenizer, messages[:place], tools=tools)
            after = self._template(messages[: place + 1], tools)
            if ids[: len(after)] != after or after[: len(before)] != before:
                return BROKEN_PREFIX
            mask[len(before) : self._end(after)] = [True] * (self._end(after) - len(before))
        return Tokens(ids, mask)

    def _whole(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[int], int]:
        """Return all tokens, and where the last answer begins."""
        asked = prompt_ids(self._tokenizer, messages[:-1], tools=tools)
        last = messages[-1]
        if isinstance(last.get("content"), str) and not last.get("tool_calls"):
            return asked + response_ids(self._tokenizer, last["content"]), len(asked)
        whole = self._template(messages, tools)
        if whole[: len(asked)] != asked:
            raise ValueError(BROKEN_PREFIX)
        end = self._end(whole)
        ids = whole[:end]
        return ids if ids[-1:] == [self._eos] else [*ids, self._eos], len(asked)

    def _template(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        if self._tokenizer.chat_template is None:
            return prompt_ids(self._tokenizer, messages, tools=tools)
        ids = self._tokenizer.apply_chat_template(
            messages,  # type: ignore[arg-type]
            tools=tools,  # type: ignore[arg-type]
            tokenize=True,
            return_dict=False,
        )
        return list(ids)  # type: ignore[arg-type]

    def _end(self, ids: list[int]) -> int:
        """Return where the last turn ends: behind its end token, where the template has one."""
        if self._eos not in ids[-4:]:
            return len(ids)
        return len(ids) - ids[::-1].index(self._eos)

    @property
    def _eos(self) -> int:
        return eos_id(self._tokenizer)


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
