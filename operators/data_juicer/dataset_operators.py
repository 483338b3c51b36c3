"""Data-Juicer's operators on all rows: deduplicators, selectors, groupers and aggregators."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import polars as pl
import pyarrow as pa

from ...store.errors import OperatorError
from ..body import Batches, Declared, on_all_rows
from ..invariants import id_column
from ..kinds import KEEP, MARKS, REASON
from ..scope import places_by_group
from . import registry
from .dataset import PLACE, Dataset
from .output_columns import boundary, probe
from .row_operators import no_text, reads
from .steps import META, Samples, plain, put
from .text_paths import Place

BATCH = "batch_id"
"""Column with the batch that a grouper puts a row in: the id of the batch's first row."""

_BATCH_META = "__dj__batch_meta__"
_UID = "__dj__uid"


def body(
    name: str, params: Mapping[str, Any], fields: Mapping[str, Place], *, by: str, prefix: str
) -> Declared:
    """Return the body of an operator that looks at all rows, with its kind and columns."""
    op = registry.build(name, params)
    kind = registry.kind_of(op)
    if kind == "selector":
        return _filter(fields, lambda data: _selected(op, name, params, data))
    if kind == "deduplicator":
        with boundary(name):
            _hashed(op, Dataset(probe(list(fields))))
        # one that filters no sample rewrites texts
        if ".filter(" in registry.source_of(type(op).process):
            return _filter(fields, lambda data: _first_ones(op, data))
        return _rewrite(op, name, fields)
    if kind == "grouper":
        return _batches(op, name, fields)
    return _aggregate(op, name, fields, by, prefix)


Dropped = dict[int, str | int]
"""Why a row is dropped, by its index: a reason, or the index of the row that it repeats."""


def _filter(fields: Mapping[str, Place], judge: Callable[[Dataset], Dropped]) -> Declared:
    def mark(rows: pl.DataFrame) -> pl.DataFrame:
        key, data = id_column(rows.columns), _dataset(rows, fields)
        why = dict.fromkeys(range(rows.height), no_text(fields)) | dict.fromkeys(data.places)
        for place, reason in judge(data).items():
            is_row = isinstance(reason, int)
            why[place] = f"repeats {key} {rows[key][reason]}" if is_row else reason
        reasons = pl.Series(REASON, list(why.values()), pl.String)
        return rows.with_columns(reasons.is_null().alias(KEEP), reasons)

    body = on_all_rows(mark, MARKS)
    return Declared(body=body, kind="filter", reads=reads(fields), scope="all")


def _first_ones(op: Any, data: Dataset) -> Dropped:
    hashed = _hashed(op, data)
    left, _ = op.process(hashed)
    return _repeats(hashed, set(left.places))


def _hashed(op: Any, data: Dataset) -> Dataset:
    given = set(data.samples)
    # not the instance's method, which makes copies of every sample for nested names
    hashed = data.map(lambda one: type(op).compute_hash(op, one))
    return hashed if set(hashed.samples) > given else data


def _repeats(hashed: Dataset, left: set[int]) -> Dropped:
    """Return, for each dropped sample, the one of its cluster that is kept.

    Two samples are in one cluster when a hash, or a part of a hash at the same position, is equal.
    """
    leader: dict[int, int] = {p: p for p in hashed.places}

    def find(place: int) -> int:
        while leader[place] != place:
            leader[place] = place = leader[leader[place]]
        return place

    names = [n for n in hashed.samples if n.startswith("__dj__") and n != _UID]
    seen: dict[Any, int] = {}
    for name in names:
        for place, value in zip(hashed.places, hashed.samples[name], strict=True):
            for part in enumerate(value) if isinstance(value, list) else [(0, value)]:
                one, other = find(seen.setdefault((name, *part), place)), find(place)
                # the smallest index leads, whatever the order in which hashes are met
                leader[max(one, other)] = min(one, other)
    stays = {find(place): place for place in sorted(left, reverse=True)}
    gone = (place for place in hashed.places if place not in left)
    return {place: stays.get(find(place), "it repeats a row that stays") for place in gone}


def _selected(op: Any, name: str, params: Mapping[str, Any], data: Dataset) -> Dropped:
    left = set(op.process(data).places)
    field = str(params.get("field_key", ""))
    message = ", ".join(f"{k}={v!r}" for k, v in params.items())
    gone: Dropped = {}
    for place, one in zip(data.places, data, strict=True):
        if place not in left:
            value = f"{field} {_at(one, field)!r}: " if field else ""
            gone[place] = f"{value}not selected by {name}({message})"
    return gone


def _at(one: Mapping[str, Any], field: str) -> Any:
    for key in field.split("."):
        one = one[key]
    return one


def _rewrite(op: Any, name: str, fields: Mapping[str, Place]) -> Declared:
    text = fields["text"]
    text.check_one(f"Data-Juicer's `{name}` rewrites one text a row")

    def rewrite(rows: pl.DataFrame) -> pl.DataFrame:
        data = _dataset(rows, fields)
        done, _ = op.process(_hashed(op, data))
        cells = rows[text.column].to_list()
        for place, new in zip(done.places, done["text"], strict=True):
            cells[place] = text.replaced(cells[place], [new])
        return rows.with_columns(pl.Series(text.column, cells, pl.String))

    return Declared(
        body=on_all_rows(rewrite),
        kind="clean",
        reads=reads(fields),
        writes=(text.column,),
        scope="all",
    )


def _batches(op: Any, name: str, fields: Mapping[str, Place]) -> Declared:
    """Represent a grouper's batches as a column, from which an aggregator can rebuild them."""

    def group(rows: pl.DataFrame) -> pl.DataFrame:
        firsts: list[str | None] = [None] * rows.height
        if name != "naive_reverse_grouper":
            ids = rows[id_column(rows.columns)]
            for batch in op.process(_dataset(rows, fields)) or ():
                for place in batch[PLACE]:
                    firsts[place] = ids[min(batch[PLACE])]
        return rows.with_columns(pl.Series(BATCH, firsts, pl.String))

    body = on_all_rows(group, {BATCH: pl.String})
    return Declared(body=body, kind="derive", reads=reads(fields), writes=[BATCH], scope="all")


def _aggregate(op: Any, name: str, fields: Mapping[str, Place], by: str, prefix: str) -> Declared:
    given = [getattr(op, key, None) for key in ("output_key", "meta_tag_key")]
    keys = [key for key in given if key] or _tried(op, name, fields)
    columns = {prefix + key: key for key in keys}

    def aggregate(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = pl.DataFrame(pl.from_arrow(batch))
        made: dict[str, list[str | None]] = {name: [None] * rows.height for name in columns}
        samples, owners = rows.select(reads(fields)), rows[by].to_list()
        for places in places_by_group(owners):
            if owners[places[0]] is None:
                continue
            done = op.process_single(_batch(samples[places], fields))
            for column, key in columns.items():
                values = _of_rows(done, key, len(places))
                for place, value in zip(places, values, strict=True):
                    made[column][place] = value
        return pa.record_batch({n: pa.array(v, pa.string()) for n, v in made.items()})

    return Declared(
        body=Batches(aggregate, dict.fromkeys(columns, pl.String()), by_group=True),
        kind="derive",
        reads=list(dict.fromkeys([*reads(fields), by])),
        writes=list(columns),
        scope="group" if by == "group_id" else "all",
    )


def _batch(rows: pl.DataFrame, fields: Mapping[str, Place]) -> dict[str, Any]:
    """Return rows as an aggregator takes them; every field but the text is a tag as well."""
    values = {n: [p.value(c) for c in rows[p.column]] for n, p in fields.items()}
    tags = [name for name in values if name != "text"]
    metas = [{name: values[name][i] for name in tags} for i in range(rows.height)]
    return {**values, META: metas, _BATCH_META: {}}


def _of_rows(done: Mapping[str, Any], key: str, rows: int) -> list[str | None]:
    if key in done[_BATCH_META]:
        return [_text(done[_BATCH_META][key])] * rows
    return [_text(meta.get(key)) for meta in done[META]]


def _text(value: Any) -> str | None:
    value = plain(value)
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=plain)


def _tried(op: Any, name: str, fields: Mapping[str, Place]) -> list[str]:
    sample = {field: ["one text", "another"] for field in fields}
    tags = [{f: v[i] for f, v in sample.items() if f != "text"} for i in range(2)]
    keys = list(op.process_single({**sample, META: tags, _BATCH_META: {}})[_BATCH_META])
    if not keys:
        raise OperatorError(f"Data-Juicer's `{name}` set nothing for a batch of two plain texts")
    return keys


def _dataset(rows: pl.DataFrame, fields: Mapping[str, Place]) -> Dataset:
    """Return the rows that have a text; several texts of a row are one, line by line."""
    samples: Samples = {}
    for name, place in fields.items():
        values = [place.value(cell) for cell in rows[place.column].to_list()]
        is_list = name == "text" and place.is_several
        samples[name] = ["\n".join(v) if is_list and v else v for v in values]
    texts = samples.get("text", [""] * rows.height)
    places = [i for i, text in enumerate(texts) if text is not None and text != []]
    left: Samples = {_UID: list(places)}
    for name, values in samples.items():
        put(left, name, [values[i] for i in places])
    return Dataset(left, places=places)
