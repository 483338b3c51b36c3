"""Filters of near-duplicates: the first of several similar rows is kept, and the others name it."""

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
import polars as pl
from pydantic import Field

from ...store.errors import OperatorError
from ..body import Declared, on_all_rows
from ..decorator import operator
from ..invariants import id_column
from ..kinds import KEEP, MARKS, REASON
from ..scope import UNIT, Within, seen
from ..vectors import embedded, embedder_of
from . import cosine, minhash
from .greedy import Alike, blocks_of

Similarity = Annotated[float, Field(gt=0, le=1)]
_TEXTS = 4096
"""That are embedded at once."""


@operator("filter")
def drop_near_duplicates(
    *,
    column: str = "response_text",
    within: Within = "all",
    threshold: Similarity = 0.7,
    shingle: Annotated[int, Field(ge=2, le=16)] = 4,
    same_numbers: bool = True,
) -> Declared:
    """Drop rows whose text is nearly that of an earlier row that is kept (by MinHash).

    Texts are similar if they share at least `threshold` of their pieces of `shingle` characters
    (Jaccard), ignoring case and white space. With `same_numbers`, texts with different numbers are
    never similar: "3 apples" and "4 apples" are different problems. Rows are compared with the kept
    rows before them, so later rows never change the outcome of earlier ones. A text that is NULL or
    blank is similar to no other.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "response_text": [
    ...     "Add 2 and 2, then you have 4.", "add 2 and 2,  then you have 4!", "Add 3 and 3."]})
    >>> drop_near_duplicates().split(rows)[1].select("experience_id", "reason").rows()
    [('b', 'alike a: 0.87 of their 4-character pieces are the same, 0.7 is enough')]
    """

    def find(values: pl.Series, units: Sequence[object]) -> Alike:
        if values.dtype != pl.String:
            raise OperatorError(f"`{column}` is {values.dtype}, expected texts")
        texts = values.to_list()
        blocks = blocks_of(units, texts if same_numbers else None)
        return minhash.first_alike(texts, blocks, threshold=threshold, length=shingle)

    message = f"{{:.2f}} of their {shingle}-character pieces are the same, {threshold:g} is enough"
    return _first_stays(column, within, find, message)


@operator("filter")
def drop_near_embeddings(
    *,
    column: str = "response_text",
    within: Within = "all",
    threshold: Similarity = 0.9,
    embedder: str = "hashed_ngrams",
    same_numbers: bool = True,
) -> Declared:
    """Drop rows whose embedding is close to that of an earlier row that is kept.

    Rows are similar if their vectors have a cosine of at least `threshold`. `column` holds vectors,
    or texts that `embedder` embeds: a built-in embedder, or `package.module:function` of a list of
    texts. The rest is as in `drop_near_duplicates`, except that `same_numbers` needs texts. The
    work grows with the square of the number of rows.

    >>> rows = pl.DataFrame({"experience_id": list("abc"),
    ...                      "vector": [[1.0, 0.0], [0.0, 1.0], [2.0, 0.1]]})
    >>> drop_near_embeddings(column="vector").split(rows)[1]["reason"].to_list()
    ['alike a: their vectors have a cosine of 1.00, 0.9 is enough']
    """
    embedder_of(embedder)

    def find(values: pl.Series, units: Sequence[object]) -> Alike:
        is_text = values.dtype == pl.String
        texts = values.to_list() if is_text else None
        vectors = _vectors(values) if texts is None else _embedded(embedder, texts)
        blocks = blocks_of(units, texts if same_numbers else None)
        return cosine.first_alike(vectors, blocks, threshold=threshold)

    message = f"their vectors have a cosine of {{:.2f}}, {threshold:g} is enough"
    return _first_stays(column, within, find, message)


def _first_stays(
    column: str, within: Within, find: Callable[[pl.Series, Sequence[object]], Alike], message: str
) -> Declared:
    unit = UNIT.get(within)

    def mark(rows: pl.DataFrame) -> pl.DataFrame:
        known = _has_something(rows[column]).arg_true()
        units = rows[unit].gather(known).to_list() if unit else [None] * len(known)
        alike = find(rows[column].gather(known), units)
        goes = np.flatnonzero(alike.places >= 0)
        ids, places = rows[id_column(rows.columns)], known.to_numpy()
        reasons: list[str | None] = [None] * rows.height
        for row in goes:
            similarity = message.format(alike.similarities[row])
            reasons[places[row]] = f"alike {ids[int(places[alike.places[row]])]}: {similarity}"
        reason = pl.Series(REASON, reasons, pl.String)
        return rows.with_columns(reason.is_null().alias(KEEP), reason)

    reads = (column, unit) if unit else (column,)
    return Declared(body=on_all_rows(mark, MARKS), reads=reads, scope=seen(within))


def _has_something(values: pl.Series) -> pl.Series:
    if values.dtype == pl.String:
        has = values.str.strip_chars() != ""
    elif isinstance(values.dtype, pl.List | pl.Array):
        has = values.is_not_null()
    else:
        raise OperatorError(f"`{values.name}` is {values.dtype}, expected texts or vectors")
    return has.fill_null(False)  # noqa: FBT003


def _embedded(embedder: str, texts: Sequence[str]) -> np.ndarray:
    made = embedded(embedder, texts[:_TEXTS])
    rest = range(_TEXTS, len(texts), _TEXTS)
    length = made.shape[1]
    parts = (embedded(embedder, texts[i : i + _TEXTS], length=length) for i in rest)
    return np.concatenate([made, *parts])


def _vectors(values: pl.Series) -> np.ndarray:
    lengths = values.cast(pl.List(pl.Float32)).list.len().unique().sort().to_list()
    if len(lengths) > 1:
        raise OperatorError(
            f"vectors of {lengths} numbers are compared; keep those of one embedder"
        )
    return np.array(values.to_list(), np.float32).reshape(len(values), -1)
