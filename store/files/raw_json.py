"""JSON text as it is spelled: values are told apart, and kept byte for byte."""

import json
import re
from collections.abc import Iterator, Sequence
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path
from typing import Any, TextIO

_SPACE = re.compile(r"[ \t\n\r]*")
_CHUNK = 1 << 20
_decode = json.JSONDecoder().raw_decode


class Raw(str):
    """JSON text, to be written as it stands."""

    __slots__ = ()


def members(text: str, *, once: bool = False) -> dict[str, str]:
    """Return the values of an object by key, each as the text that stands there.

    Of a key that comes twice the last value counts; with `once`, ValueError names it.

    >>> members('{"a": 1.50, "b": {"y":2, "x" : "\\\\u00e9"}}')
    {'a': '1.50', 'b': '{"y":2, "x" : "\\\\u00e9"}'}
    """
    found: dict[str, str] = {}
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        name, end = scanstring(text, at + 1)
        if once and name in found:
            raise ValueError(f"has the key `{name}` twice")
        start = _skip(text, _skip(text, end) + 1)
        found[name], at = _value(text, start)
    return found


def elements(text: str) -> list[str]:
    """Return the elements of a list, each as the text that stands there.

    >>> elements('[1.0, {"a" : 1}]')
    ['1.0', '{"a" : 1}']
    """
    found: list[str] = []
    at = _skip(text, text.index("[") + 1)
    while text[at] != "]":
        value, at = _value(text, at)
        found.append(value)
    return found


def listed(parts: Sequence[str]) -> Raw:
    """Return the text of a list with these elements.

    >>> listed(['1.0', '{"a" : 1}'])
    '[1.0, {"a" : 1}]'
    """
    return Raw(f"[{', '.join(parts)}]")


def one_line(text: str) -> Raw:
    """Return JSON text without line breaks, which can stand only between its values.

    >>> one_line('[1,\\n 2]')
    '[1,  2]'
    """
    return Raw(text.replace("\r", " ").replace("\n", " "))


def dumps(value: Any) -> Raw:
    """Return a value as JSON text."""
    return Raw(json.dumps(value, ensure_ascii=False))


def objects(path: Path) -> Iterator[str]:
    """Yield the text of each object of a file: of a list of them, or of one after the other.

    Only one is in memory, and a megabyte of what follows. Raises ValueError where no object stands,
    and for a list that has no end, or has something behind it.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = _Reader(file)
        is_list = reader.at("[")
        expects = False
        while True:
            if is_list and reader.at("]"):
                if expects or not reader.ended:
                    raise ValueError("something stands where the list should end")
                return
            if not is_list and reader.ended:
                return
            yield reader.value()
            expects = is_list and reader.at(",")
            if is_list and not expects and not reader.peek("]"):
                raise ValueError("the list has no end, or no comma between two objects")


class _Reader:
    """A file's text, of which as much is in memory as the value that is being read."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at = file, "", 0

    @property
    def ended(self) -> bool:
        return not self.peek("")

    def peek(self, mark: str) -> bool:
        """Tell whether a mark, or with "" anything, comes next; passes over space."""
        self._at = _match(_SPACE, self._text, self._at)
        while self._at == len(self._text) and self._more():
            self._at = _match(_SPACE, self._text, self._at)
        return self._at < len(self._text) and self._text.startswith(mark, self._at)

    def at(self, mark: str) -> bool:
        """Pass over a mark, if it comes next."""
        found = self.peek(mark)
        self._at += len(mark) if found else 0
        return found

    def value(self) -> str:
        """Return the object that comes next."""
        while True:
            self.peek("")
            try:
                value, end = _decode(self._text, self._at)
            except (json.JSONDecodeError, IndexError):
                if not self._more():
                    raise ValueError("an object has no end, or is none") from None
                continue
            if not isinstance(value, dict):
                raise ValueError(f"expected objects, got a {type(value).__name__}")
            text = self._text[self._at : end]
            self._at = end
            return text

    def _more(self) -> bool:
        """Read on: a megabyte, or as much again as there is."""
        more = self._file.read(max(_CHUNK, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


def _value(text: str, at: int) -> tuple[str, int]:
    """Return the value that begins at a place, and the place of what follows it and its comma."""
    end = _decode(text, at)[1]
    after = _skip(text, end)
    return text[at:end], _skip(text, after + 1) if text[after] == "," else after


def _skip(text: str, at: int) -> int:
    return _match(_SPACE, text, at)


def _match(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None, "the pattern matches nothing, too"
    return found.end()
