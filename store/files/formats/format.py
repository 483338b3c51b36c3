"""Named formats: the columns that identify them, and the conversion of their rows."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ...raw_json import Raw, dumps, elements, listed
from ..select_columns import RowError, check_messages, plain, short

Ours = dict[str, Any]
"""A row of ours, by column; JSON columns are text, byte for byte as in the file."""
LEFT_OUT = "left_out"
"""Key with the reason why a row is left out."""
NOT_READ = "not_read"
"""Key with the reason why a part of a row was not read."""


class Row:
    """One row of a file: its values, and the original text of those that are JSON."""

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        texts: Mapping[str, str] | None = None,
        numbers: Collection[str] = (),
    ) -> None:
        self._values = {k: plain(v) for k, v in (values or {}).items()}
        self._texts = {k: v for k, v in (texts or {}).items() if v != "null"}
        self._numbers = numbers

    def __contains__(self, name: str) -> bool:
        return name in self._texts or self._values.get(name) is not None

    @property
    def names(self) -> list[str]:
        """The columns that are not NULL."""
        return [n for n in self._columns if n in self]

    @property
    def _columns(self) -> list[str]:
        return list({**self._values, **self._texts})

    @property
    def numbers(self) -> list[str]:
        """The columns that hold numbers; in typed files, also those that are NULL in this row."""
        return [n for n in self._columns if n in self._numbers or is_number(self.get(n))]

    def as_dict(self) -> dict[str, Any]:
        """Return the values that are not NULL."""
        return {name: self.get(name) for name in self.names}

    def get(self, name: str) -> Any:
        """Return a value, or None."""
        if name in self._texts and name not in self._values:
            self._values[name] = json.loads(self._texts[name])
        return self._values.get(name)

    def parsed(self, name: str) -> Any:
        """Return a value, parsed if it is JSON text."""
        value, text = self.get(name), self.json(name)
        if not isinstance(value, str) or text is None:
            return value
        try:
            return json.loads(text)
        except ValueError:
            return value

    def json(self, name: str) -> Raw | None:
        """Return a value as JSON text, byte for byte if the file holds JSON."""
        if name not in self:
            return None
        value = self.get(name)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):  # JSON kept as text
            return Raw(value)
        return Raw(self._texts[name]) if name in self._texts else dumps(value)

    def pop(self, name: str) -> Any:
        """Return a value, or None, and leave it out from now on."""
        value = self.get(name)
        self._texts.pop(name, None)
        self._values.pop(name, None)
        return value

    def text(self, name: str) -> str | None:
        """Return a value that must be text."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(f"column `{name}` must be text, got {short(value)}")
        return value

    def number(self, name: str) -> float | None:
        """Return a value that must be a number; NaN, which data frames use for NULL, is None."""
        value = self.get(name)
        if value is not None and not isinstance(value, int | float):
            raise wrong(f"column `{name}` must be a number, got {short(value)}")
        # NaN is the only value that differs from itself
        return None if value is None or value != value else float(value)

    def whole(self, name: str) -> int | None:
        """Return a value that must be a whole number."""
        value = self.number(name)
        if value is not None and value != int(value):
            raise wrong(f"column `{name}` must be a whole number, got {value}")
        return None if value is None else int(value)

    def conversation(self, name: str) -> Raw | None:
        """Return the text of a conversation; raise RowError for anything else."""
        return self.json(name) if self.messages(name) is not None else None

    def messages(self, name: str) -> list[str] | None:
        """Return the text of each message of a conversation, or None for NULL."""
        text = self.json(name)
        return None if text is None else messages(text, name)

    def turns(self, name: str, role: str) -> list[str]:
        """Return the text of each message; a value of plain text is one message of `role`."""
        value = self.get(name)
        if isinstance(value, str) and value.lstrip()[:2] != "[{":
            return [message(role, value)]
        return self.messages(name) or []


def messages(text: str, name: str) -> list[str]:
    """Return the text of each message of a conversation; raise RowError for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        raise wrong(f"column `{name}` must hold messages, got {short(text)}") from None
    check_messages(name, value)
    return elements(text)


@dataclass(frozen=True)
class Format:
    """A named format."""

    name: str
    about: str
    """A short description for listings."""
    needs: Sequence[frozenset[str]]
    """Sets of columns: a file of this format has all columns of at least one set."""
    columns: Sequence[str] = ()
    """Our columns that its rows fill."""
    rows: Callable[[Row], list[Ours]] | None = None
    """Gives the experiences of one row of the file."""
    has_tasks: bool = False
    """Whether its conversations can also be read as tasks."""
    selects: Mapping[str, str] = field(default_factory=dict)
    """The SELECT over `input` for each table, instead of `rows`."""
    is_pairs: bool = False
    """Whether its experiences come in pairs, the better one first."""
    known_by: Sequence[frozenset[str]] | None = None
    """Sets of columns that identify the format without naming it; None: `needs`."""

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that it fills."""
        if self.selects:
            return tuple(self.selects)
        given = {"tasks": self.has_tasks, "experiences": self.rows, "preferences": self.is_pairs}
        return tuple(name for name, is_given in given.items() if is_given)

    def tasks(self, row: Row) -> list[Ours]:
        """Return the task of a row: its prompt, with the last answer as the reference."""
        assert self.rows is not None, "a format without a SELECT gives rows"
        conversation = elements(self.rows(row)[0]["messages"])
        last = json.loads(conversation[-1])
        if last["role"] != "assistant":
            return [{"messages": listed(conversation)}]
        content = last.get("content")
        answer = content if isinstance(content, str) else None
        return [{"messages": listed(conversation[:-1]), "answer": answer}]

    def fits(self, columns: Collection[str]) -> bool:
        """Return whether a file with these columns may be of this format."""
        return any(needed <= set(columns) for needed in self.needs)

    def is_sure(self, columns: Collection[str]) -> bool:
        """Return whether a file with these columns can be of no other format."""
        known_by = self.needs if self.known_by is None else self.known_by
        return any(needed <= set(columns) for needed in known_by)


def wrong(message: str) -> RowError:
    """Make the error of a row; the reader of the file adds the row number."""
    return RowError(0, message)


def message(role: str, content: str) -> Raw:
    """Return the text of a message."""
    return dumps({"role": role, "content": content})


def is_number(value: object) -> bool:
    """Return whether a value is a number or a boolean, which counts as 0 or 1."""
    return isinstance(value, int | float)


def named(row: Row, names: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return numbers by name; NaN and infinity become NULL."""
    values = {n: row.get(n) for n in names}
    found = {n: float(v) if v is not None and isfinite(v) else None for n, v in values.items()}
    return [{"name": n, "value": v} for n, v in found.items()] or None


def others(row: Row, used: Sequence[str]) -> Raw | None:
    """Return the remaining columns as JSON text for `metadata`."""
    parts = [f"{dumps(n)}: {row.json(n)}" for n in row.names if n not in used]
    return Raw("{" + ", ".join(parts) + "}") if parts else None


def aligned(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
) -> Ours:
    """Return the per-token columns; values of the response alone are padded over the prompt."""
    n, m = len(prompt), len(response)
    for name, values in (("logprobs", logprobs), ("mask", mask)):
        if values is not None and len(values) != m:
            raise wrong(f"{len(values)} {name} for {m} tokens of the response, expected one each")
    return {
        "token_ids": [*prompt, *response],
        "loss_mask": [False] * n + ([True] * m if mask is None else [bool(b) for b in mask]),
        "logprobs": None if logprobs is None else [0.0] * n + list(logprobs),
        "prompt_length": n,
        "num_tokens": n + m,
    }


TOKENS = ("token_ids", "loss_mask", "logprobs", "prompt_length", "num_tokens")
"""The columns that `aligned` fills."""
