"""Infer the columns that steps write, by running them on sample texts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from ...store.errors import OperatorError, RlakeError, message_of
from . import registry
from .guards import AbsentError
from .steps import META, NOTHING, STATS, Done, Samples, Step, plain, put, run

_PROBES = (
    "What is 2 + 2?\nThe answer is 4, see http://a.org/b or write to c@d.org.",
    "Two words",
    "一加一等于二",
    "",
)
_INNER = "__dj__"
_KNOWN = {"general_field_filter": {"general_field_filter_condition": pl.Boolean()}}
_MEDIA = ("images", "audios", "videos", "image_bytes")


@dataclass(frozen=True)
class Written:
    """One column that steps write."""

    name: str
    key: str
    """Data-Juicer's name of it."""
    home: str
    """STATS, META, or "" for a field of the sample itself."""
    kind: pl.DataType

    def values(self, done: Done, rows: int) -> list[Any]:
        """Return a value for each sample that was given; None where there is none."""
        if self.home == STATS and self.kind.is_numeric():
            return [one.get(self.key) for one in done.stats]
        if self.home == STATS:
            return [self._cell(one.get(self.key)) for one in done.stats]
        cells: list[Any] = [None] * rows
        given = done.samples.get(self.home or self.key, [None] * len(done.places))
        for place, value in zip(done.places, given, strict=True):
            cells[place] = self._cell(value.get(self.key) if self.home and value else value)
        return cells

    def _cell(self, value: Any) -> Any:
        value = plain(value)
        if self.kind == pl.String and value is not None and not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False, default=plain)
        return value


def written(
    steps: Sequence[Step], fields: Sequence[str], prefix: str
) -> tuple[list[Written], set[str]]:
    """Try each step on a sample; return the columns that they write, and the fields they change.

    Raises OperatorError when one does not work on any text.
    """
    found: dict[tuple[str, str], list[Any]] = {}
    columns: list[Written] = []
    changed: set[str] = set()
    for step in steps:
        if step.name in _KNOWN:
            known = _KNOWN[step.name].items()
            columns += [Written(prefix + key, key, STATS, kind) for key, kind in known]
            continue
        given, done = probe(fields), _tried(step, probe(fields))
        _collect(found, done, given)
        for name, values in given.items():
            if not name.startswith(_INNER) and done.samples.get(name) != [
                values[i] for i in done.places
            ]:
                changed.add(name)
        if not step.is_filter:
            changed |= registry.fields_set(step.name) & set(fields)
    columns += [Written(prefix + k, k, home, kind_of(v)) for (home, k), v in found.items()]
    if not columns and not any(step.is_filter for step in steps):  # what else would they do
        changed |= {"text"} & set(fields)
    return columns, changed


def kind_of(values: Sequence[Any]) -> pl.DataType:
    """Return the type of a column that holds values: JSON text for what is not plain.

    >>> kind_of([1, 0.5]), kind_of([{"a": 1}]), kind_of([[1, 2]])
    (Float64, String, List(Int64))
    """
    given = [plain(v) for v in values if v is not None]
    if given and all(isinstance(v, bool) for v in given):
        return pl.Boolean()
    if given and all(isinstance(v, int) for v in given):
        return pl.Int64()
    if given and all(isinstance(v, int | float) for v in given):
        return pl.Float64()
    if given and all(isinstance(v, list) for v in given):
        inner = [one for v in given for one in v]
        if inner and all(isinstance(one, str) for one in inner):
            return pl.List(pl.String())
        # an array without elements still is one of numbers
        kind = kind_of(inner) if inner or not hasattr(values[0], "dtype") else pl.Float64()
        return pl.String() if kind == pl.String else pl.List(kind)
    return pl.String()


def arrow(kind: pl.DataType, values: Sequence[Any]) -> pa.Array:
    """Return values as an Arrow array of a column's type."""
    of = {pl.Boolean: pa.bool_(), pl.Int64: pa.int64(), pl.Float64: pa.float64()}
    if isinstance(kind, pl.List):
        return pa.array(values, pa.list_(of.get(type(kind.inner), pa.string())))
    return pa.array(values, of.get(type(kind), pa.string()))


def _tried(step: Step, samples: Samples) -> Done:
    with boundary(step.name):
        return run([step], samples)


@contextmanager
def boundary(name: str) -> Iterator[None]:
    """Turn an error on a sample, before any work, into one that says what is missing."""
    try:
        yield
    except AbsentError as error:
        raise AbsentError(f"Data-Juicer's `{name}` needs {error}") from error
    except RlakeError:
        raise
    except Exception as error:  # the boundary of the library's code
        raise OperatorError(
            f"Data-Juicer's `{name}` fails on a plain text with {type(error).__name__}: "
            f"{message_of(error)}; "
            "if it reads other fields than `text`, name their columns in `columns`"
        ) from error


def _collect(found: dict[tuple[str, str], list[Any]], done: Done, given: Samples) -> None:
    for one in done.stats:  # some note a field that they read
        _note(found, STATS, {k: v for k, v in one.items() if k not in given})
    known = {key for one in given.get(META, ()) for key in one}
    for one in done.samples.get(META, ()):
        _note(found, META, {k: v for k, v in (one or {}).items() if k not in known})
    for name, values in done.samples.items():
        if name not in given and not name.startswith(_INNER):
            found["", name] = list(values)


def _note(found: dict[tuple[str, str], list[Any]], home: str, one: Mapping[str, Any]) -> None:
    for key, value in one.items():
        found.setdefault((home, key), []).append(value)


def probe(fields: Sequence[str]) -> Samples:
    """Return samples to try an operator on: texts with what operators look for, and without."""
    samples: Samples = {}
    for name in fields:
        put(samples, name, [_probe(name, text) for text in _PROBES])
    return samples or {NOTHING: list(_PROBES)}


def _probe(name: str, text: str) -> Any:
    if name in _MEDIA:
        return []
    if name.startswith(_INNER):
        return float(len(text))
    return _conversation(text) if name == "messages" else text


def _conversation(text: str) -> list[dict[str, Any]]:
    function = {"name": "search", "arguments": "{}"}
    call = {"id": "1", "type": "function", "function": function}
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "search", "content": "success: 4"},
        {"role": "assistant", "content": text},
    ]
