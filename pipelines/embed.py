"""Embed responses that have no vector yet, one bounded batch at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from ..operators.vectors import embedded, embedder_of
from ..store import Store
from ..store.embeddings import length_of
from ..store.ids import lineage_id
from ..store.lineage.pipeline_runs import pipeline_run
from ..store.query import columns_of, is_in, literal

_ROWS = 4096
_BYTES = 8 << 20


@dataclass(frozen=True)
class Embedded:
    """The result of `embed`."""

    embedder: str
    """As it is stored: the name, and the version or the digest of its source."""
    rows: int
    """Vectors stored by this call."""
    already: int
    without_text: int
    length: int | None
    """Numbers of a vector; None when there was nothing to do."""


def embed(
    store: Store,
    embedder: str = "hashed_ngrams",
    *,
    where: str | None = None,
    listener: Callable[[int, int], None] | None = None,
) -> Embedded:
    """Store vectors in `embeddings` for responses that this embedder has not embedded.

    `embedder` is a built-in embedder, or `package.module:function` of a list of texts that returns
    an array [texts, length]. Rows with at most 8 MiB of text are embedded at once and are one
    commit, so the same call continues one that was killed. `listener` is called with the number of
    rows that are done, and of all rows.

    Raises OperatorError for an unknown function or an invalid result; QueryError when `where` is
    not a condition.
    """
    _, name = embedder_of(embedder)
    columns_of(where or "true")  # raises unless it is one condition, which goes into a query
    past = store.at(store.versions())
    chosen = _chosen(past, name, where or "true")
    todo = chosen.filter(pl.col("num_bytes") > 0, ~pl.col("is_done"))
    made_by = lineage_id()
    done, length = 0, length_of(past, name)
    for part in _parts(todo):
        rows = _texts(past, part)
        vectors = embedded(embedder, rows["response_text"].to_list(), length=length)
        length = vectors.shape[1]
        store.append("embeddings", _rows(rows["experience_id"], name, vectors, made_by))
        done += rows.height
        if listener is not None:
            listener(done, todo.height)
    if done:  # last: a killed call leaves vectors, which the next one does not make again
        store.append("lineage", [_lineage(past, name, where, made_by, chosen.height, done)])
    without = int((chosen["num_bytes"] == 0).sum())
    return Embedded(name, done, int(chosen["is_done"].sum()), without, length)


def _chosen(store: Store, name: str, where: str) -> pl.DataFrame:
    """Return the ids of the chosen rows, how long their text is, and whether it was embedded."""
    return store.sql(
        "SELECT experience_id, coalesce(strlen(trim(response_text)), 0) AS num_bytes, "
        "experience_id IN (SELECT experience_id FROM embeddings "
        f"WHERE embedder = {literal(name)}) AS is_done FROM experiences WHERE ({where}\n)"
    ).pl()


def _parts(todo: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Cut rows into parts of at most _ROWS and about _BYTES of text, but one row at least."""
    start, size = 0, 0
    for i, num_bytes in enumerate(todo["num_bytes"]):
        if i > start and (i - start >= _ROWS or size + num_bytes > _BYTES):
            yield todo[start:i]
            start, size = i, 0
        size += num_bytes
    if start < todo.height:
        yield todo[start:]


def _texts(store: Store, part: pl.DataFrame) -> pl.DataFrame:
    found = store.dataset("experiences").to_table(
        columns=["experience_id", "response_text"],
        filter=is_in("experience_id", part["experience_id"]),
    )
    return pl.DataFrame(pl.from_arrow(found))


def _rows(ids: pl.Series, name: str, vectors: np.ndarray, made_by: str) -> pl.DataFrame:
    lists = pl.Series(vectors).cast(pl.List(pl.Float32))
    columns = {"experience_id": ids, "embedder": name, "vector": lists, "lineage_id": made_by}
    return pl.DataFrame(columns)


def _lineage(
    store: Store, name: str, where: str | None, made_by: str, num_in: int, num_out: int
) -> dict[str, Any]:
    return pipeline_run(
        made_by,
        pipeline=f"embed by {name}",
        source="table experiences" + (f" where {where}" if where else ""),
        sink="table embeddings",
        rows_in=num_in,
        rows_out=num_out,
        read={"experiences": store.versions()["experiences"]},
    )
