"""Filters of near-duplicates: of rows that are alike the first stays, and the others name it."""

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from ...store.errors import OperatorError
from ..body import Declared, FrameFunction
from ..decorator import operator
from ..invariants import id_column
from ..kinds import KEEP, REASON
from ..scope import UNIT, Within, seen
from ..vectors import embedded, embedder_of
from . import cosine, minhash
from .greedy import Alike, blocks_of

_SHINGLE = (2, 16)
_TEXTS = 4096
"""That are embedded at once."""


@operator("filter")
def drop_near_duplicates(
    *,
    column: str = "response_text",
    within: Within = "all",
    threshold: float = 0.7,
    shingle: int = 4,
    same_numbers: bool = True,
) -> Declared:
    """Drop rows whose text is nearly that of an earlier row that stays (by MinHash).

    Alike are texts that share `threshold` or more of the pieces of `shingle` characters that
    either has (Jaccard), case and white space aside. With `same_numbers` texts that hold other
    numbers are never alike: "3 apples" is another problem than "4 apples". Rows are compared with
    the kept ones before them, so that later rows never change what became of earlier ones. A text
    that is NULL or blank is alike none.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "response_text": [
    ...     "Add 2 and 2, then you have 4.", "add 2 and 2,  then you have 4!", "Add 3 and 3."]})
    >>> drop_near_duplicates().split(rows)[1].select("experience_id", "reason").rows()
    [('b', 'alike a: 0.87 of their 4-character pieces are the same, 0.7 is enough')]
    """
    _check_share(threshold)
    if not _SHINGLE[0] <= shingle <= _SHINGLE[1]:
        raise OperatorError(f"`shingle` must be from 2 to 16 characters, got {shingle}")

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
    threshold: float = 0.9,
    embedder: str = "hashed_ngrams",
    same_numbers: bool = True,
) -> Declared:
    """Drop rows whose embedding points nearly where that of an earlier row that stays does.

    Alike are rows whose vectors have a cosine of `threshold` or more. `column` holds vectors, or
    texts that are embedded by `embedder`: one of ours by name, or `package.module:function` of a
    list of texts. All else is as in `drop_near_duplicates`; of vectors no numbers are known. The
    work grows with the square of the rows that may be alike.

    >>> rows = pl.DataFrame({"experience_id": list("abc"),
    ...                      "vector": [[1.0, 0.0], [0.0, 1.0], [2.0, 0.1]]})
    >>> drop_near_embeddings(column="vector").split(rows)[1]["reason"].to_list()
    ['alike a: their vectors have a cosine of 1.00, 0.9 is enough']
    """
    _check_share(threshold)
    embedder_of(embedder)

    def find(values: pl.Series, units: Sequence[object]) -> Alike:
        is_text = values.dtype == pl.String
        texts = values.to_list() if is_text else None
        vectors = _vectors(values) if texts is None else _embedded(embedder, texts)
        blocks = blocks_of(units, texts if same_numbers else None)
        return cosine.first_alike(vectors, blocks, threshold=threshold)

    message = f"their vectors have a cosine of {{:.2f}}, {threshold:g} is enough"
    return _first_stays(column, within, find, message)


def _check_share(threshold: float) -> None:
    if not 0 < threshold <= 1:
        raise OperatorError(f"`threshold` must be above 0 and at most 1, got {threshold}")


def _first_stays(
    column: str, within: Within, find: Callable[[pl.Series, Sequence[object]], Alike], told: str
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
            similarity = told.format(alike.similarities[row])
            reasons[places[row]] = f"alike {ids[int(places[alike.places[row]])]}: {similarity}"
        reason = pl.Series(REASON, reasons, pl.String)
        return rows.with_columns(reason.is_null().alias(KEEP), reason)

    def filter_(frame: pl.LazyFrame) -> pl.LazyFrame:
        schema = {**frame.collect_schema(), KEEP: pl.Boolean(), REASON: pl.String()}
        return frame.map_batches(mark, schema=schema)

    body: FrameFunction = filter_
    reads = (column, unit) if unit else (column,)
    return Declared(body=body, reads=reads, scope=seen(within))


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
