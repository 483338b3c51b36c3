"""JSON text as it is spelled: values are told apart, and kept byte for byte."""

import json
import re
from collections.abc import Iterator, Sequence
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN = re.compile(r"[ \t\n\r,\[\]]*")
_CHUNK = 1 << 20
_decode = json.JSONDecoder().raw_decode


class Raw(str):
    """JSON text, to be written as it stands."""

    __slots__ = ()


def members(text: str) -> dict[str, str]:
    """Return the values of an object by key, each as the text that stands there.

    >>> members('{"a": 1.50, "b": {"y":2, "x" : "\\\\u00e9"}}')
    {'a': '1.50', 'b': '{"y":2, "x" : "\\\\u00e9"}'}
    """
    found: dict[str, str] = {}
    at = _skip(text, text.index("{") + 1)
    while text[at] != "}":
        name, end = scanstring(text, at + 1)
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

    Only one is in memory, and a megabyte of what follows. Raises ValueError where no object stands.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        text, at = "", 0
        while True:
            at = _match(_BETWEEN, text, at)
            try:
                value, end = _decode(text, at)
            except (json.JSONDecodeError, IndexError):
                more = file.read(max(_CHUNK, len(text) - at))
                if not more and at == len(text):
                    return
                if not more:
                    raise
                text, at = text[at:] + more, 0
                continue
            if not isinstance(value, dict):
                raise ValueError(f"expected objects, got a {type(value).__name__}")
            yield text[at:end]
            at = end


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
