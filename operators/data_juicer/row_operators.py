"""Its filters and mappers as bodies of operators: Arrow batches in, columns out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from ...store.errors import OperatorError
from ..body import Batches, Declared
from ..invariants import OF_A_RUN, id_column
from ..kinds import KEEP, REASON
from .output_columns import Written, arrow, boundary, probe, written
from .steps import NOTHING, Done, Samples, Step, put, run
from .text_paths import Place

Fields = Mapping[str, Place]
"""Where each of Data-Juicer's fields is in our rows; `text` is one of them."""

_OF_THE_TEXT = (
    "token_ids", "loss_mask", "logprobs", "prompt_length", "segments", "token_rewards",
    "teacher_logprobs", "reward", "rewards", "advantage", "priority", "finish_reason",
)  # fmt: skip
"""Columns that say something of the text as it was, NULL in rows with another text."""


def body(steps: Sequence[Step], fields: Fields, prefix: str) -> Declared:
    """Return the body of an operator that calls steps, with its kind and columns."""
    if not fields:
        raise OperatorError(
            f"Data-Juicer's `{steps[0].name}` reads no text; name the columns of its fields in "
            "`columns`"
        )
    if steps[-1].makes_rows:
        return _augment(steps, fields)
    beside, changed = written(steps, list(fields), prefix)
    texts = {name: fields[name] for name in fields if name in changed}
    is_filter = any(step.is_filter for step in steps)
    call = _Call(steps, fields, texts, beside, is_filter)
    kind = "filter" if is_filter else "derive" if beside else "clean"
    return Declared(
        body=Batches(call, columns=call.columns),
        kind=kind,
        reads=_reads(fields),
        writes=[name for name in call.columns if name not in (KEEP, REASON)],
        scope="row",
    )


def _reads(fields: Fields) -> list[str]:
    return list(dict.fromkeys(place.column for place in fields.values()))


@dataclass
class _Call:
    """A call of steps on a batch."""

    steps: Sequence[Step]
    fields: Fields
    changed: Fields
    beside: Sequence[Written]
    is_filter: bool

    def __post_init__(self) -> None:
        self._text = self.fields.get("text")
        self._is_several = self._text is not None and self._text.is_several
        self._kinds = {w.name: pl.List(w.kind) if self._is_several else w.kind for w in self.beside}
        for place in self.changed.values():
            if place.is_several and place is not self._text:
                raise OperatorError(f"`{place}` may be several texts; name one, as `messages[-1]`")

    @property
    def columns(self) -> dict[str, pl.DataType]:
        marks = {KEEP: pl.Boolean(), REASON: pl.String()} if self.is_filter else {}
        texts = {place.column: pl.String() for place in self.changed.values()}
        return {**marks, **texts, **self._kinds}

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        cells = {name: batch.column(name).to_pylist() for name in _reads(self.fields)}
        texts = self._texts_of(batch, cells)
        owners = [row for row, own in enumerate(texts) for _ in own]
        done = run(self.steps, _samples(self.fields, cells, texts, owners))
        columns = self._marks(texts, owners, done) if self.is_filter else {}
        columns |= self._texts(cells, owners, done)
        columns |= self._values(len(texts), owners, done)
        return pa.record_batch(columns)

    def _texts_of(
        self, batch: pa.RecordBatch, cells: Mapping[str, list[Any]]
    ) -> Sequence[Sequence[str]]:
        if self._text is None:
            return [("",)] * batch.num_rows
        kind = batch.schema.field(self._text.column).type
        if not (
            pa.types.is_string(kind) or pa.types.is_large_string(kind) or "string" in str(kind)
        ):
            raise OperatorError(f"column `{self._text.column}` is {kind}, expected text")
        return [self._text.texts(cell) for cell in cells[self._text.column]]

    def _marks(
        self, texts: Sequence[Sequence[str]], owners: Sequence[int], done: Done
    ) -> dict[str, pa.Array]:
        reasons: list[str | None] = [
            None if own else f"there is no text in `{self._text}`" for own in texts
        ]
        for place, reason in done.reasons.items():
            reasons[owners[place]] = reasons[owners[place]] or reason
        keep = [reason is None for reason in reasons]
        return {KEEP: pa.array(keep, pa.bool_()), REASON: pa.array(reasons, pa.string())}

    def _texts(
        self, cells: Mapping[str, list[Any]], owners: Sequence[int], done: Done
    ) -> dict[str, pa.Array]:
        made: dict[str, pa.Array] = {}
        for name, place in self.changed.items():
            new: dict[int, list[str]] = {}
            for at, text in zip(done.places, done.samples[name], strict=True):
                new.setdefault(owners[at], []).append(text)
            cut = {owners[at] for at in done.reasons}
            made[place.column] = pa.array(
                [
                    place.replaced(cell, new[row]) if row in new and row not in cut else cell
                    for row, cell in enumerate(cells[place.column])
                ],
                pa.string(),
            )
        return made

    def _values(self, rows: int, owners: Sequence[int], done: Done) -> dict[str, pa.Array]:
        made: dict[str, pa.Array] = {}
        for one in self.beside:
            values: list[Any] = [None] * rows
            for owner, value in zip(owners, one.values(done, len(owners)), strict=True):
                if self._is_several:
                    values[owner] = [*(values[owner] or ()), value]
                else:
                    values[owner] = value
            made[one.name] = arrow(self._kinds[one.name], values)
        return made


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
    if text.is_several:
        raise OperatorError(
            f"Data-Juicer's `{step.name}` makes new rows of one text, and `{text}` may be several; "
            f"name one, as `{text.column}[-1].{text.field or 'content'}`"
        )

    with boundary(step.name):
        step.run(probe(list(fields)))

    def pieces(rows: pl.DataFrame) -> pl.DataFrame:
        cells = {name: rows[name].to_list() for name in _reads(fields)}
        owners, made = [], []
        for row, cell in enumerate(cells[text.column]):
            own = text.texts(cell)
            if own:
                one = _samples(fields, {n: [c[row]] for n, c in cells.items()}, [own], [0])
                done, _ = step.run(one)
                new = [t for t in dict.fromkeys(done["text"]) if t != own[0]]
                owners += [row] * len(new)
                made += [text.replaced(cell, [t]) for t in new]
        return _children(rows, owners, pl.Series(text.column, made, pl.String))

    def body(frame: pl.LazyFrame) -> pl.LazyFrame:
        schema = frame.collect_schema()
        return frame.map_batches(pieces, schema={**schema, "parent_id": pl.String()})

    return Declared(body=body, kind="augment", reads=_reads(fields), scope="row")


def _children(rows: pl.DataFrame, owners: Sequence[int], texts: pl.Series) -> pl.DataFrame:
    """Return new rows with other texts, each made from one of the rows given."""
    key = id_column(rows.columns)
    parents = rows[list(owners)]
    nothing = [key, "group_id", *OF_A_RUN, *_OF_THE_TEXT]
    own = {n: pl.lit(None, t).alias(n) for n, t in rows.schema.items() if n in nothing}
    if "source" in rows.columns:
        own["source"] = pl.lit("synthetic").alias("source")
    return parents.with_columns(parents[key].alias("parent_id"), texts, *own.values()).select(
        [*rows.columns, "parent_id"] if "parent_id" not in rows.columns else rows.columns
    )
