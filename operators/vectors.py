"""Embeddings of texts, and the novelty of a row among others."""

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from ..store.errors import OperatorError
from . import embed
from .body import Batches, Declared, on_all_rows
from .decorator import operator
from .import_path import find_function
from .prioritize import seen_within
from .source_digest import digest
from .user_errors import one_line

Embedder = Callable[[Sequence[str]], np.ndarray]
"""Texts to vectors [texts, length]."""

_BYTES = 32 << 20
"""Most bytes of similarities in memory at once."""
_SCALE = float(1 << 24)


def embedder_of(name: str) -> tuple[Embedder, str]:
    """Return a built-in embedder, or the one at `package.module:function`, and its stored name.

    >>> embedder_of("hashed_ngrams")[1]
    'hashed_ngrams@1'

    Raises OperatorError when there is none.
    """
    function = find_function(name, embed, "embedder", error=OperatorError)
    return function, f"{name}@{digest(function) if ':' in name else embed.VERSION}"


def embedded(name: str, texts: Sequence[str], *, length: int | None = None) -> np.ndarray:
    """Return the vectors of texts, float32 [texts, length].

    Raises OperatorError when the embedder raises, or returns something else.
    """
    try:
        return _vectors(name, texts, length)
    except OperatorError:
        raise
    except Exception as error:  # the boundary of user code
        raise OperatorError(f"embedder `{name}` failed: {one_line(error)}") from error


def _vectors(name: str, texts: Sequence[str], length: int | None = None) -> np.ndarray:
    function, _ = embedder_of(name)
    given = np.asarray(function(texts), np.float32)
    if given.ndim != 2 or len(given) != len(texts) or given.shape[1] != (length or given.shape[1]):
        numbers = "length" if length is None else str(length)
        raise OperatorError(
            f"embedder `{name}` returned an array of shape {list(given.shape)}, expected "
            f"[{len(texts)}, {numbers}]"
        )
    if not np.isfinite(given).all():
        raise OperatorError(f"embedder `{name}` returned NaN or infinity, expected numbers")
    return given


@operator("derive", writes=("embedder", "vector"))
def embedding(*, embedder: str = "hashed_ngrams", column: str = "response_text") -> Declared:
    """Set `vector` to the embedding of a text column, and `embedder` to the embedder's name.

    `embedder` is a built-in embedder, or `package.module:function` of a list of texts that returns
    an array [texts, length]. A text that is NULL or blank has no vector. The vectors are for later
    operators; `rlake embed` stores vectors of responses for `rlake similar`.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "response_text": ["four", None]})
    >>> rows.pipe(embedding())["vector"].list.len().to_list()
    [256, None]
    """
    _, stored_as = embedder_of(embedder)

    def embed_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
        vectors = _of_texts(pl.Series(batch[column]), embedder)
        names = vectors.is_not_null().replace_strict({True: stored_as, False: None})
        made = pl.DataFrame({"embedder": names.cast(pl.String), "vector": vectors})
        return made.to_arrow().combine_chunks().to_batches()[0]

    columns = {"embedder": pl.String, "vector": pl.List(pl.Float32)}
    return Declared(body=Batches(embed_texts, columns=columns), reads=(column,))


@operator("prioritize", writes=("priority",))
def novelty(
    *,
    column: str = "response_text",
    within: str = "task_id",
    embedder: str = "hashed_ngrams",
    into: str = "priority",
) -> Declared:
    """Set the priority to how much a row differs from the others of its task, from 0 to 1.

    1 minus the largest cosine (at least 0) between the row's vector and that of any other row of
    the same `within`; 1 for a single row. `column` holds vectors, or texts that `embedder` embeds.
    NULL where the text or vector is missing. The work grows with the square of the number of rows
    compared.

    >>> rows = pl.DataFrame({"experience_id": list("abc"), "task_id": "t",
    ...                      "vector": [[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]]})
    >>> rows.pipe(novelty(column="vector"))["priority"].to_list()
    [0.0, 0.0, 1.0]
    """
    embedder_of(embedder)

    def measure(rows: pl.DataFrame) -> pl.DataFrame:
        vectors = rows[column]
        if vectors.dtype == pl.String:
            vectors = _of_texts(vectors, embedder)
        known = rows.select(within).with_row_index("place").filter(_is_known(vectors))
        value = np.full(rows.height, np.nan)
        for part in known.partition_by(within):
            places = part["place"].to_numpy()
            value[places] = _distances(_units(vectors.gather(places)))
        return rows.with_columns(pl.Series(into, value).fill_nan(None))

    body, reads = on_all_rows(measure, {into: pl.Float64}), tuple(dict.fromkeys((column, within)))
    return Declared(body=body, reads=reads, writes=(into,), scope=seen_within(within))


def _of_texts(texts: pl.Series, embedder: str) -> pl.Series:
    """Return a list of numbers for each text; NULL for one that is NULL or blank."""
    has_text = (texts.str.strip_chars() != "").fill_null(False)  # noqa: FBT003
    places = has_text.arg_true()
    known = texts.gather(places).to_list()
    vectors = _vectors(embedder, known) if known else np.empty((0, 1), np.float32)
    lists = pl.Series(vectors).cast(pl.List(pl.Float32))
    back = pl.DataFrame({"place": places, "vector": lists})
    every = pl.DataFrame({"place": range(len(texts))}, schema={"place": places.dtype})
    return every.join(back, on="place", how="left", maintain_order="left")["vector"]


def _is_known(vectors: pl.Series) -> pl.Series:
    number = pl.element()
    finite = vectors.list.eval(number.is_finite() & number.is_not_null())
    return finite.list.all() & (vectors.list.len() > 0)


def _units(vectors: pl.Series) -> np.ndarray:
    """Return vectors scaled to length 1, as whole numbers of 2^-24; zeros stay zeros."""
    length, *others = vectors.list.len().unique().sort()
    if others:
        raise ValueError(f"vectors of {length} and of {others[0]} numbers are compared")
    made = vectors.explode().to_numpy().astype(np.float64).reshape(len(vectors), length)
    lengths = np.sqrt((made * made).sum(axis=1, keepdims=True))
    # whole numbers, so that BLAS may add products up in any order; see `_distances`
    return np.rint(made / np.maximum(lengths, np.finfo(np.float64).tiny) * _SCALE)


def _distances(units: np.ndarray) -> np.ndarray:
    """Return how far each vector is from the nearest other one."""
    n = len(units)
    nearest = np.zeros(n)
    rows_at_once = max(1, _BYTES // (8 * n))
    for start in range(0, n, rows_at_once):
        # products of whole numbers add up to less than 2^53: the same bits in any order
        cosines = units[start : start + rows_at_once] @ units.T / _SCALE**2
        own = np.arange(start, start + len(cosines))
        cosines[own - start, own] = 0.0
        nearest[own] = cosines.max(axis=1)
    return 1.0 - np.clip(nearest, 0.0, 1.0)
