"""Search experiences by the words of their responses, or by similarity to another one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import lance
import numpy as np
import pyarrow as pa

from . import embeddings
from .errors import NotFoundError, QueryError, reading
from .query import columns_of, is_in, literal
from .schema_versions import take
from .tables import Tables

if TYPE_CHECKING:
    import polars as pl

SHOWN = ("experience_id", "score", "run_id", "batch", "reward", "prompt_text", "response_text")
"""Columns of a search result."""
_MOST = 1000
_FEW = 2 * _MOST
_GROWTH = 8

Ranked: TypeAlias = "Callable[[int], tuple[pl.DataFrame, bool]]"
"""Returns the best n as experience_id and score, in order, and whether there are more."""


def search(store: Tables, text: str, *, k: int = 10, where: str | None = None) -> "pl.DataFrame":
    """Return the k experiences whose responses match the words best (BM25), best first.

    Rows that are not in the index yet are found too.
    """
    _check(k, where)
    if not text.strip():
        raise QueryError("the text to search for is empty; give a word or more")
    dataset = store.dataset("experiences")

    def ranked(n: int) -> "tuple[pl.DataFrame, bool]":
        with reading("table `experiences`"):
            hits = dataset.to_table(
                columns=["experience_id", "_score"],
                full_text_query=lance.query.MatchQuery(text, "response_text"),
                limit=n,
            )
        found = _frame(hits.column("experience_id"), hits.column("_score").to_numpy())
        return found, found.height == n

    return _first(store, ranked, k, where)


def similar(
    store: Tables,
    experience_id: str,
    *,
    k: int = 10,
    embedder: str | None = None,
    where: str | None = None,
) -> "pl.DataFrame":
    """Return the k experiences most similar to a stored one, by the cosine of their vectors.

    Up to `embeddings.WORTH_ROWS` vectors are all compared; above that, the index is used.
    """
    import polars as pl

    _check(k, where)
    embedder = embeddings.chosen(store, embedder)
    query = embeddings.vector_of(store, embedder, experience_id)
    if query is None:
        raise _not_embedded(store, embedder, experience_id)
    if not query.any():
        raise QueryError(
            f"the vector of `{experience_id}` is zero, as of an empty text: nothing is like it"
        )
    dataset = store.dataset("embeddings")

    def ranked(n: int) -> "tuple[pl.DataFrame, bool]":
        found = embeddings.indexed(store, embedder, query, k=n) or everything()
        best = pl.DataFrame(
            {"_rowid": found.row_ids[:n], "score": found.similarity[:n].astype(np.float64)}
        )
        rows = take(dataset, best["_rowid"].to_list(), ["experience_id", "_rowid"])
        # the index may contain rows that were deleted since
        there = best.join(pl.DataFrame(pl.from_arrow(rows)), on="_rowid", maintain_order="left")
        others = there.filter(pl.col("experience_id") != experience_id)
        return others.select("experience_id", "score"), best.height == n

    compared: list[embeddings.Nearest] = []

    def everything() -> embeddings.Nearest:
        if not compared:
            compared.append(embeddings.exact(store, embedder, query))
        return compared[0]

    return _first(store, ranked, k, where)


def _first(store: Tables, ranked: Ranked, k: int, where: str | None) -> "pl.DataFrame":
    """Return the best k that are stored and for which `where` holds.

    More of the ranking is read only while too few of the best remain.
    """
    wanted = k + 1  # the query itself may be among them
    while True:
        best, is_more = ranked(wanted)
        kept = _kept(store, best["experience_id"], where)
        rows = best.join(kept, on="experience_id", maintain_order="left").head(k)
        if rows.height == k or not is_more:
            # Ties go by id, so that equal scores come in the same order from every store.
            ordered = rows.sort(["score", "experience_id"], descending=[True, False])
            return ordered.select(SHOWN)
        # A condition may leave few of the best rows, so the next search looks much further at once.
        wanted *= _GROWTH


def _kept(store: Tables, ids: "pl.Series", where: str | None) -> "pl.DataFrame":
    """Return the columns SHOWN of the stored experiences for which `where` holds."""
    condition = f"({where}\n)" if where else "true"
    # a scan is faster than a condition on thousands of ids
    if len(ids) > _FEW:
        query = f"SELECT experience_id FROM experiences_current AS experiences WHERE {condition}"
        held = store.sql(query).pl()["experience_id"]
        ids = ids.filter(ids.is_in(held.implode())).head(_FEW)
        condition = "true"
    columns = ", ".join(c for c in SHOWN if c != "score")
    rows = f"experiences_current AS experiences WHERE {is_in('experience_id', ids)}"
    return store.sql(f"SELECT {columns} FROM {rows} AND {condition}").pl()


def _check(k: int, where: str | None) -> None:
    if not 1 <= k <= _MOST:
        raise QueryError(f"`k` must be 1 to {_MOST}, got {k}")
    if where is not None:
        columns_of(where)


def _not_embedded(store: Tables, embedder: str, experience_id: str) -> NotFoundError:
    wanted = literal(experience_id)
    [(stored,)] = store.sql(
        f"SELECT count(*) FROM experiences WHERE experience_id = {wanted}"
    ).fetchall()
    if stored:
        return NotFoundError(
            f"experience `{experience_id}` has no vector by `{embedder}` yet; make it with "
            f"`rlake embed --embedder {embedder.rpartition('@')[0] or embedder}`"
        )
    hint = nearest_id(store, "embeddings", experience_id)
    return NotFoundError(f"no experience `{experience_id}`{hint}")


def nearest_id(store: Tables, table: str, experience_id: str) -> str:
    """Return `; did you mean `ID`?` for the closest experience_id of a table, or nothing."""
    distance = f"levenshtein(experience_id, {literal(experience_id)})"
    close = store.sql(
        f"SELECT experience_id FROM {table} WHERE {distance} <= {len(experience_id) // 2} "
        f"ORDER BY {distance} LIMIT 1"
    ).fetchall()
    return f"; did you mean `{close[0][0]}`?" if close else ""


def _frame(ids: pa.ChunkedArray, scores: np.ndarray) -> "pl.DataFrame":
    import polars as pl

    made = pl.DataFrame(
        {"experience_id": pl.Series(values=ids), "score": scores.astype(np.float64)}
    )
    return made.sort(["score", "experience_id"], descending=[True, False])
