"""Separate a model's thought, which stands between tags, from the answer that follows it."""

from collections.abc import Callable, Mapping
from typing import Any

from ...store.errors import ConfigError, nearest
from .tool_calls import overlap

FORMATS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "magistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
"""The tags around a thought, by the name of the format."""
# Noncharacters, which Unicode excludes from texts: one stream carries thoughts and answers.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


def known_reasoning(name: str | None) -> str | None:
    """Return the name of a format; ConfigError if it does not exist."""
    if name is not None and name not in FORMATS:
        raise ConfigError(f"reasoning format `{name}` does not exist{nearest(name, FORMATS)}")
    return name


def is_open(prompt: str, reasoning_format: str) -> bool:
    """Return whether a prompt ends within a thought, which the template has begun.

    >>> is_open("<|assistant|><think>\\n", "think"), is_open("<think>\\n\\n</think>\\n", "think")
    (True, False)
    """
    return prompt.rstrip().endswith(FORMATS[reasoning_format][0])


def split_reasoning(
    text: str, reasoning_format: str, *, is_begun: bool = False
) -> tuple[str | None, str]:
    """Return the thought of an answer, None without one, and the rest.

    A thought without its end is all of the answer. `is_begun`: the prompt has the first tag.

    >>> split_reasoning("<think>\\n2 + 2\\n</think>\\n\\nFour.", "think")
    ('2 + 2', 'Four.')
    >>> split_reasoning("Four.", "think")
    (None, 'Four.')
    """
    begin, end = FORMATS[reasoning_format]
    thought = text.lstrip()
    if not thought.startswith(begin) and not is_begun:
        return None, text
    thought, _, rest = thought.removeprefix(begin).partition(end)
    return thought.strip("\n"), rest.lstrip("\n")


def marked(message: Mapping[str, Any]) -> str:
    """Return the thought and the content of an answer as `ReasoningStream` passes them."""
    thought, content = message.get("reasoning_content"), str(message.get("content") or "")
    return content if thought is None else f"{_OPEN}{thought}{_CLOSE}{content}"


class ReasoningStream:
    """Passes an answer as it comes, with its thought marked, once tags are known as such.

    Text that may begin a tag is held back, and line breaks until a text follows them.

    >>> stream, parts = ReasoningStream("think"), MarkedParts()
    >>> [parts(stream(text)) for text in ("<thi", "nk>\\n2 +", " 2\\n</think>\\n", "\\nFour.")]
    [[], [(True, '2 +')], [(True, ' 2')], [(False, 'Four.')]]
    """

    def __init__(
        self, reasoning_format: str, *, is_begun: bool = False, content: Callable[[str], str] = str
    ) -> None:
        """`content` passes on what follows the thought, such as what is outside tool calls."""
        self._begin, self._end = FORMATS[reasoning_format]
        self._kept, self._content = "", content
        self._is_decided, self._is_begun, self._thinks = False, is_begun, False
        self._is_blank = False  # line breaks before a thought or a content are left out

    def __call__(self, text: str) -> str:
        """Return the marked text that is final after an answer continues with `text`."""
        self._kept += text.replace(_OPEN, "").replace(_CLOSE, "")
        if not self._is_decided:
            begun = self._kept.lstrip()
            if self._begin.startswith(begun):  # nothing yet, or a part of the tag
                return ""
            self._is_decided = True
            self._thinks = self._is_begun or begun.startswith(self._begin)
            if self._thinks:
                self._kept, self._is_blank = begun.removeprefix(self._begin), True
                return _OPEN + self._thought()
        return self._thought() if self._thinks else self._rest()

    def _thought(self) -> str:
        sure, tag, rest = self._kept.partition(self._end)
        if not tag:
            sure = sure[: len(sure) - overlap(sure, self._end)]
        passed = self._after_breaks(sure).rstrip("\n")
        if not tag:
            kept = self._kept.lstrip("\n") if self._is_blank else self._kept
            self._is_blank &= not passed
            self._kept = kept[len(passed) :]
            return passed
        self._thinks, self._kept, self._is_blank = False, rest, True
        return f"{passed}{_CLOSE}{self._rest()}"

    def _rest(self) -> str:
        passed, self._kept = self._after_breaks(self._kept), ""
        self._is_blank &= not passed
        return self._content(passed) if passed else ""

    def _after_breaks(self, text: str) -> str:
        return text.lstrip("\n") if self._is_blank else text


class MarkedParts:
    """Takes marked text apart, as it comes."""

    def __init__(self) -> None:
        self._thinks = False

    def __call__(self, text: str) -> list[tuple[bool, str]]:
        """Return the next parts, each with whether it is of the thought."""
        made: list[tuple[bool, str]] = []
        if _OPEN not in text and _CLOSE not in text:
            return [(self._thinks, text)] if text else []
        for character in text:
            if character in (_OPEN, _CLOSE):
                self._thinks = character == _OPEN
            elif made and made[-1][0] == self._thinks:
                made[-1] = (self._thinks, made[-1][1] + character)
            else:
                made.append((self._thinks, character))
        return made
