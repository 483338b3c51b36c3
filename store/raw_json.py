"""Split JSON text into its values without reformatting them."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from json.decoder import scanstring  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path
from typing import Any, TextIO

_SPACE = re.compile(r"[ \t\n\r]*")
_CHUNK = 1 << 20
_decode = json.JSONDecoder().raw_decode


class Raw(str):
    """JSON text, to be written unchanged."""

    __slots__ = ()


def members(text: str, *, once: bool = False) -> dict[str, str]:
    """Return the values of an object by key, each as its original text.

    The last value of a repeated key counts; with `once`, it raises ValueError.

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
    """Return the elements of a list, each as its original text.

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
    """Return JSON text without line breaks, which can occur only between values.

    >>> one_line('[1,\\n 2]')
    '[1,  2]'
    """
    return Raw(text.replace("\r", " ").replace("\n", " "))


_encode = json.JSONEncoder(ensure_ascii=False).encode


def dumps(value: Any) -> Raw:
    """Return a value as JSON text."""
    return Raw(_encode(value))


def objects(path: Path) -> Iterator[str]:
    """Yield the text of each object of a file, in a list or concatenated.

    Only one object and a megabyte of following text are in memory. Raises ValueError for values
    that are not objects, and for a list without an end or followed by other text.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = _Reader(file)
        is_list = reader.at("[")
        expects = False
        while True:
            if is_list and reader.at("]"):
                if expects or not reader.ended:
                    raise ValueError("the list should end, and is followed by other text")
                return
            if not is_list and reader.ended:
                return
            yield reader.value()
            expects = is_list and reader.at(",")
            if is_list and not expects and not reader.peek("]"):
                raise ValueError("the list has no end, or no comma between two objects")


class _Reader:
    """Reads a file incrementally, with only the current value in memory."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at = file, "", 0

    @property
    def ended(self) -> bool:
        return not self.peek("")

    def peek(self, mark: str) -> bool:
        """Skip white space; return whether a mark, or with "" anything, comes next."""
        self._at = _match(_SPACE, self._text, self._at)
        while self._at == len(self._text) and self._more():
            self._at = _match(_SPACE, self._text, self._at)
        return self._at < len(self._text) and self._text.startswith(mark, self._at)

    def at(self, mark: str) -> bool:
        """Skip a mark, if it comes next."""
        found = self.peek(mark)
        self._at += len(mark) if found else 0
        return found

    def value(self) -> str:
        """Return the next object."""
        while True:
            self.peek("")
            try:
                value, end = _decode(self._text, self._at)
            # The value may only be cut off where the text read so far ends.
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
        # double the text: an object is decoded from its start after each read
        more = self._file.read(max(_CHUNK, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


def _value(text: str, at: int) -> tuple[str, int]:
    """Return the value at a position, and the position after it and its comma."""
    # only the end is used: the parsed value would write 1.50 as 1.5, and round long integers
    end = _decode(text, at)[1]
    after = _skip(text, end)
    return text[at:end], _skip(text, after + 1) if text[after] == "," else after


def _skip(text: str, at: int) -> int:
    return _match(_SPACE, text, at)


def _match(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None, "the pattern matches nothing, too"
    return found.end()


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as one line of JSON; times are ISO text, and NaN, which JSON lacks, is null.

    `Raw` values are JSON already, and written unchanged.

    >>> json_line({"reward": 0.5, "text": "a b"})
    '{"reward": 0.5, "text": "a b"}'
    """
    return "{" + ", ".join(f"{dumps(str(k))}: {json_text(v)}" for k, v in row.items()) + "}"


def json_text(value: Any) -> str:
    """Return one value as `json_line` writes it."""
    if isinstance(value, Raw):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        # DuckDB's sums of integers come as decimals without places
        return int(value) if value.as_tuple().exponent == 0 else float(value)
    return value.hex() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
