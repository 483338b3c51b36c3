"""Data-Juicer's filters and mappers as bodies of operators on Arrow batches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from ...store.errors import OperatorError
from ..body import Batches, Declared
from ..derived_rows import NEW_TEXT, ParentRow, new_rows
from ..kinds import KEEP, MARKS, REASON
from .output_columns import Written, arrow, boundary, probe, written
from .steps import NOTHING, Done, Samples, Step, put, run
from .text_paths import Place

Fields = Mapping[str, Place]
"""Where each of Data-Juicer's fields is in our rows; `text` is one of them."""


def body(steps: Sequence[Step], fields: Fields, prefix: str) -> Declared:
    """Return the body of an operator that calls steps, with its kind and columns."""
    if not fields:
        raise OperatorError(
            f"Data-Juicer's `{steps[0].name}` reads no text; name the columns of its fields in "
            "`columns`"
        )
    if steps[-1].makes_rows:
        return _augment(steps, fields)
    extra, changed = written(steps, list(fields), prefix)
    texts = {name: fields[name] for name in fields if name in changed}
    is_filter = any(step.is_filter for step in steps)
    call = _Call(steps, fields, texts, extra, is_filter)
    kind = "filter" if is_filter else "derive" if extra else "clean"
    return Declared(
        body=Batches(call, columns=call.columns),
        kind=kind,
        reads=reads(fields),
        writes=[name for name in call.columns if name not in (KEEP, REASON)],
        scope="row",
    )


def reads(fields: Fields) -> list[str]:
    """Return the columns that hold these fields."""
    return list(dict.fromkeys(place.column for place in fields.values()))


@dataclass
class _Call:
    steps: Sequence[Step]
    fields: Fields
    changed: Fields
    extra: Sequence[Written]
    is_filter: bool

    def __post_init__(self) -> None:
        self._text = self.fields.get("text")
        self._is_several = self._text is not None and self._text.is_several
        self._kinds = {w.name: pl.List(w.kind) if self._is_several else w.kind for w in self.extra}
        for place in self.changed.values():
            if place is not self._text:
                place.check_one("only one text can be changed")

    @property
    def columns(self) -> dict[str, pl.DataType]:
        marks = MARKS if self.is_filter else {}
        texts = {place.column: pl.String() for place in self.changed.values()}
        return {**marks, **texts, **self._kinds}

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        cells = {name: batch.column(name).to_pylist() for name in reads(self.fields)}
        texts = self._texts_of(batch, cells)
        owners = [row for row, own in enumerate(texts) for _ in own]
        done = run(self.steps, _samples(self.fields, cells, texts, owners))
        made = {
            **self._marks(texts, owners, done),
            **self._texts(cells, owners, done),
            **self._values(len(texts), owners, done),
        }
        return pa.record_batch({name: arrow(k, made[name]) for name, k in self.columns.items()})

    def _texts_of(
        self, batch: pa.RecordBatch, cells: Mapping[str, list[Any]]
    ) -> Sequence[Sequence[str]]:
        if self._text is None:
            return [("",)] * batch.num_rows
        kind = batch.schema.field(self._text.column).type
        if "string" not in str(kind):  # there are three kinds of text in Arrow
            raise OperatorError(f"column `{self._text.column}` is {kind}, expected text")
        return [self._text.texts(cell) for cell in cells[self._text.column]]

    def _marks(
        self, texts: Sequence[Sequence[str]], owners: Sequence[int], done: Done
    ) -> dict[str, list[Any]]:
        reasons = [None if own else no_text(self.fields) for own in texts]
        for place, reason in done.reasons.items():
            reasons[owners[place]] = reasons[owners[place]] or reason
        return {KEEP: [reason is None for reason in reasons], REASON: reasons}

    def _texts(
        self, cells: Mapping[str, list[Any]], owners: Sequence[int], done: Done
    ) -> dict[str, list[Any]]:
        # of a row that is dropped, texts may be missing here
        dropped = {owners[at] for at in done.reasons}
        made: dict[str, list[Any]] = {}
        for name, place in self.changed.items():
            new = _by_owner((owners[at] for at in done.places), done.samples[name])
            made[place.column] = [
                place.replaced(cell, new[row]) if row in new and row not in dropped else cell
                for row, cell in enumerate(cells[place.column])
            ]
        return made

    def _values(self, rows: int, owners: Sequence[int], done: Done) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {}
        for one in self.extra:
            found = _by_owner(owners, one.values(done, len(owners)))
            values = (found.get(row) for row in range(rows))
            made[one.name] = [v if self._is_several or v is None else v[0] for v in values]
        return made


def _by_owner(owners: Iterable[int], values: Iterable[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for owner, value in zip(owners, values, strict=True):
        found.setdefault(owner, []).append(value)
    return found


def no_text(fields: Fields) -> str | None:
    """Return the reason of a row that a filter drops because it has no text."""
    return f"`{fields.get('text')}` has no text"


def _samples(
    fields: Fields,
    cells: Mapping[str, list[Any]],
    texts: Sequence[Sequence[str]],
    owners: Sequence[int],
) -> Samples:
    flat = [text for own in texts for text in own]
    samples: Samples = {"text": flat} if "text" in fields else {NOTHING: flat}
    for name, place in fields.items():
        if name != "text":
            values = [place.value(cell) for cell in cells[place.column]]
            put(samples, name, [values[owner] for owner in owners])
    return samples


def _augment(steps: Sequence[Step], fields: Fields) -> Declared:
    [step], text = steps, fields["text"]
    text.check_one(f"Data-Juicer's `{step.name}` makes new rows from one text")
    with boundary(step.name):
        step.run(probe(list(fields)))

    def pieces(row: ParentRow) -> list[ParentRow]:
        cell, own = row[text.column], text.texts(row[text.column])
        if not own:
            return []
        cells = {name: [row[name]] for name in reads(fields)}
        done, _ = step.run(_samples(fields, cells, [own], [0]))
        new = [one for one in dict.fromkeys(done["text"]) if one != own[0]]
        return [{**NEW_TEXT, text.column: text.replaced(cell, [one])} for one in new]

    return Declared(
        body=lambda frame: new_rows(frame, pieces), kind="augment", reads=reads(fields), scope="row"
    )
