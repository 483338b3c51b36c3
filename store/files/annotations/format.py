"""Items to label and their labels, independent of the annotation tool."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...raw_json import json_line
from ..atomic_writer import whole
from ..yaml_text import read_text

MOST_BYTES = 1 << 30
"""Largest file of labels that is read."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """One person's label of one item."""

    experience_id: str
    annotator: str
    compared_id: str | None = None
    label: str | None = None
    score: float | None = None
    comment: str | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One item that people are asked to label."""

    experience_id: str
    prompt: str
    response: str
    answer: str | None = None
    compared_id: str | None = None
    other_response: str | None = None


Record = Mapping[str, Any]


@dataclass(frozen=True)
class AnnotationFormat:
    """How to read a tool's labels, and how to write its items to label."""

    read: Callable[[Record], Iterator[Given]]
    """Returns the labels of one record; raises ValueError or KeyError for an invalid one."""
    write: Callable[[Asked], dict[str, Any]]
    """Returns the record that asks for a label."""


def answers(path: Path, form: AnnotationFormat) -> list[Given]:
    """Return all labels of a file: a JSON list of records, or one record a line.

    Raises InputError, with the record's number, for a file or a record that cannot be read.
    """
    found = []
    for number, record in enumerate(_records(path), 1):
        try:
            if not isinstance(record, Mapping):
                raise ValueError(f"it is a {type(record).__name__}, expected an object")
            found += form.read(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"record {number} of `{path}` holds no labels: {missing}") from error
    if not found:
        raise InputError(f"`{path}` holds no labels; nothing was imported")
    return found


def write(path: Path, items: Iterable[Asked], form: AnnotationFormat) -> int:
    """Write the records that ask for labels: a JSON list, or lines in a `.jsonl` file."""
    records = [json_line(form.write(item)) for item in items]
    is_lines = path.suffix == ".jsonl"
    text = "\n".join(records) if is_lines else "[\n" + ",\n".join(records) + "\n]"
    with whole(path) as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text + "\n", encoding="utf-8")
    return len(records)


def _records(path: Path) -> list[Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"`{path}` has more than {MOST_BYTES:,} bytes; split it")
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from error
    text = read_text(path)
    try:
        if text.lstrip().startswith("["):
            return json.loads(text, object_pairs_hook=_once)
        return list(_of_lines(text))
    except ValueError as error:
        raise InputError(f"`{path}` is neither a JSON list nor lines of JSON: {error}") from error


def _of_lines(text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                yield json.loads(line, object_pairs_hook=_once)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise ValueError for a repeated key."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key `{twice}` twice")
    return made
