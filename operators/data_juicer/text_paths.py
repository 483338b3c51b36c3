"""Paths of texts in a row: a text column, or a field of messages in a JSON column."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ...store.errors import OperatorError

_PATH = re.compile(r"(?P<column>\w+)(\[(?P<which>-?\d+|\w*)\](\.(?P<field>\w+))?)?")


@dataclass(frozen=True)
class Place:
    """Where a value is: a column, or within the list that a column of JSON text holds."""

    column: str
    which: str | None = None
    """None: the column itself; "" every message, a number one of them, a word those of a role."""
    field: str | None = None

    @classmethod
    def parse(cls, path: str) -> Self:
        """Read `response_text`, `messages[-1].content`, `messages[assistant].content` and the like.

        >>> Place.parse("messages[-1].content")
        Place(column='messages', which='-1', field='content')

        Raises OperatorError for anything else.
        """
        found = _PATH.fullmatch(path)
        if found is None:
            raise OperatorError(
                f"`{path}` is not a column or a path; write `column`, `messages[].content`, "
                "`messages[-1].content` or `messages[assistant].content`"
            )
        return cls(found["column"], found["which"], found["field"])

    def __str__(self) -> str:
        if self.which is None:
            return self.column
        return f"{self.column}[{self.which}]" + (f".{self.field}" if self.field else "")

    @property
    def is_several(self) -> bool:
        """Whether a row may have more than one text here."""
        return self.which is not None and re.fullmatch(r"-?\d+", self.which) is None

    def check_one(self, why: str) -> None:
        """Raise OperatorError, with the reason `why`, where a row may have more than one text."""
        if self.is_several:
            one = f"{self.column}[-1].{self.field or 'content'}"
            raise OperatorError(f"{why}, and `{self}` may be several; name one, as `{one}`")

    def value(self, cell: Any) -> Any:
        """Return the value here: the cell itself, or the parsed list."""
        if self.which is None or cell is None:
            return cell
        if self.field is None:
            return [entry for _, entry in self._entries(json.loads(cell))]
        texts = self.texts(cell)
        return texts if self.is_several else next(iter(texts), None)

    def texts(self, cell: Any) -> list[str]:
        """Return the texts of a row, an empty list if it has none.

        >>> Place.parse("m[user].content").texts('[{"role": "user", "content": "2+2="}]')
        ['2+2=']
        """
        if cell is None:
            return []
        if self.which is None:
            return [cell]
        return [entry[self.field] for _, entry in self._with_text(json.loads(cell))]

    def replaced(self, cell: Any, texts: Sequence[str]) -> Any:
        """Return the cell with other texts; the same bytes if the texts are the same."""
        if self.which is None:
            return texts[0] if texts else cell
        if not texts or self.texts(cell) == list(texts):
            return cell
        messages = json.loads(cell)
        for (place, _), text in zip(self._with_text(messages), texts, strict=True):
            messages[place][self.field] = text
        return json.dumps(messages, ensure_ascii=False)

    def _with_text(self, messages: list[Any]) -> Iterator[tuple[int, Any]]:
        for place, entry in self._entries(messages):
            if isinstance(entry, dict) and isinstance(entry.get(self.field), str):
                yield place, entry

    def _entries(self, messages: list[Any]) -> list[tuple[int, Any]]:
        numbered = list(enumerate(messages))
        if not self.is_several:
            at = int(self.which or 0)
            return numbered[at : at + 1 or None]
        return [
            (i, one)
            for i, one in numbered
            if not self.which or (isinstance(one, dict) and one.get("role") == self.which)
        ]
