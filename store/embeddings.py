"""Nearest-neighbor search over embeddings of experiences: exact, or by an index for many vectors.

The index is a copy of one embedder's vectors in the store's folder `.indexes`, with an inverted
file over them (Lance's IVF_FLAT: exact distances, among the clusters nearest to the query). It is
derived from the table `embeddings` and can be deleted at any time: `maintain` creates it again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .errors import NotFoundError, QueryError, as_store_error, nearest
from .ids import content_id
from .query import literal
from .tables import Tables

INDEXES = ".indexes"
"""Folder of a store with data that can be derived again."""
WORTH_ROWS = 100_000
"""Number of vectors of an embedder that is worth an index; fewer are compared quickly."""
_PROBED_SHARE = 0.2
_ROWS_AT_ONCE = 8192
_OLD = timedelta(minutes=10)
_MISSING = (OSError, ValueError)


@dataclass(frozen=True)
class Nearest:
    """Rows of `embeddings`, the most similar first."""

    row_ids: np.ndarray
    similarity: np.ndarray
    """Cosine, -1 to 1."""


def embedders(store: Tables) -> dict[str, int]:
    """Return the embedders of the stored vectors, and the number of vectors of each."""
    query = "SELECT embedder, count(*) FROM embeddings GROUP BY embedder ORDER BY embedder"
    return dict(store.sql(query).fetchall())


def chosen(store: Tables, embedder: str | None) -> str:
    """Return the stored name of an embedder: the one given, or the only one.

    The given name may omit the version. Raises NotFoundError when no embedder matches, QueryError
    when several do.
    """
    known = embedders(store)
    if not known:
        raise NotFoundError("there are no embeddings yet; make them with `rlake embed`")
    meant = [k for k in known if embedder in (None, k, k.rpartition("@")[0])]
    if not meant:
        raise NotFoundError(
            f"there are no embeddings by `{embedder}`{nearest(str(embedder), known)}"
        )
    if len(meant) > 1:
        one_of = ", ".join(f"`{name}`" for name in meant)
        raise QueryError(f"there are embeddings by {one_of}; name one of them")
    return meant[0]


def exact(store: Tables, embedder: str, query: np.ndarray, *, after: int = -1) -> Nearest:
    """Compare the query with every vector of the embedder whose row id is greater than `after`.

    Vectors are read a bounded number at a time; 12 bytes a row are kept.
    """
    row_ids, similarity = [np.empty(0, np.uint64)], [np.empty(0, np.float32)]
    for ids, vectors in _vectors(store, embedder, len(query), after=after):
        row_ids.append(ids)
        similarity.append(_cosine(vectors, query))
    ids, scores = np.concatenate(row_ids), np.concatenate(similarity)
    # Stable, so that rows with equal scores keep the order in which they were read.
    order = np.argsort(-scores, kind="stable")
    return Nearest(ids[order], scores[order])


def indexed(store: Tables, embedder: str, query: np.ndarray, *, k: int) -> Nearest | None:
    """Return the k nearest by the index and by exact search of newer rows; None without one."""
    # The copy holds the newest rows; a view of the past must not find rows stored after it.
    copy = None if store.is_past else _open(store, embedder)
    # Rows embedded anew may have vectors of another length than the copy that was built before.
    if copy is None or _length(copy) != len(query):
        return None
    hits = copy.to_table(
        columns=["row_id", "_distance"],
        nearest={
            "column": "vector",
            "q": query,
            "k": k,
            "metric": "cosine",
            "minimum_nprobes": int(_PROBED_SHARE * _partitions(copy.count_rows())) + 1,
        },
    )
    known = Nearest(
        # Lance's distance is 1 - cosine
        hits.column("row_id").to_numpy(),
        1 - hits.column("_distance").to_numpy().astype(np.float32),
    )
    return _best(known, exact(store, embedder, query, after=_last(copy)), k)


def refresh(store: Tables) -> None:
    """Update the index of each embedder with many vectors, creating it if it is missing.

    Raises StoreError when it cannot be written.
    """
    for embedder, rows in embedders(store).items():
        if rows < WORTH_ROWS:
            continue
        with as_store_error(f"cannot index the vectors of `{embedder}`"):
            _refresh(store, embedder)


def vector_of(store: Tables, embedder: str, experience_id: str) -> np.ndarray | None:
    """Return the stored vector of an experience, or None."""
    condition = f"experience_id = {literal(experience_id)} AND embedder = {literal(embedder)}"
    found = store.dataset("embeddings").to_table(columns=["vector"], filter=condition)
    return np.array(found.column(0)[0].as_py(), np.float32) if len(found) else None


def _best(one: Nearest, other: Nearest, k: int) -> Nearest:
    row_ids = np.concatenate([one.row_ids, other.row_ids])
    similarity = np.concatenate([one.similarity, other.similarity])
    order = np.argsort(-similarity, kind="stable")[:k]
    return Nearest(row_ids[order], similarity[order])


def _cosine(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the cosine of each row with the query; 0 for a row of zeros."""
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors)) * np.linalg.norm(query)
    return np.divide(
        vectors @ query, norms, out=np.zeros(len(vectors), np.float32), where=norms > 0
    )


def _vectors(
    store: Tables, embedder: str, length: int, *, after: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield row ids and vectors [rows, length] of an embedder."""
    condition = f"embedder = {literal(embedder)}" + (f" AND _rowid > {after}" if after >= 0 else "")
    scanner = store.dataset("embeddings").scanner(
        columns=["vector"], filter=condition, with_row_id=True, batch_size=_ROWS_AT_ONCE
    )
    for batch in scanner.to_batches():
        lists = batch.column("vector")
        lengths = pc.list_value_length(lists).to_numpy()
        if (lengths != length).any():
            other = int(lengths[lengths != length][0])
            raise QueryError(
                f"vectors of `{embedder}` have {length} and {other} numbers, expected one length; "
                "embed again under another name"
            )
        flat = lists.flatten().to_numpy(zero_copy_only=False)
        yield batch.column("_rowid").to_numpy(), flat.reshape(-1, length)


def _refresh(store: Tables, embedder: str) -> None:
    copy = _open(store, embedder)
    length = _length(copy) if copy else length_of(store, embedder)
    assert length is not None, "there are WORTH_ROWS vectors"
    # row ids increase with each append, so greater ones are not in the copy yet
    last = _last(copy) if copy else -1
    schema = pa.schema([("row_id", pa.uint64()), ("vector", pa.list_(pa.float32(), length))])

    def batches() -> Iterator[pa.RecordBatch]:
        for row_ids, vectors in _vectors(store, embedder, length, after=last):
            values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), length)
            yield pa.record_batch([pa.array(row_ids), values], schema=schema)

    rows = pa.RecordBatchReader.from_batches(schema, batches())
    mode = "append" if copy else "create"
    copy = lance.write_dataset(
        rows, _place(store, embedder), mode=mode, storage_options=store.storage_options
    )
    _index(copy)


def _index(copy: lance.LanceDataset) -> None:
    """Index new rows; retrain when there are twice as many rows as at the last training."""
    rows = copy.count_rows()
    [trained] = [i.num_rows_indexed for i in copy.describe_indices()] or [0]
    # clusters suit only the vectors that they were trained on
    if rows >= 2 * trained:
        copy.create_index(
            "vector",
            "IVF_FLAT",
            name="vector_idx",
            metric="cosine",
            num_partitions=_partitions(rows),
            replace=True,
        )
    elif rows > trained:
        copy.optimize.compact_files()
        copy.optimize.optimize_indices()
    copy.cleanup_old_versions(older_than=_OLD)


def _partitions(rows: int) -> int:
    """Return the number of clusters for that many vectors: the square root."""
    return max(1, int(rows**0.5))


def _open(store: Tables, embedder: str) -> lance.LanceDataset | None:
    try:
        return lance.dataset(_place(store, embedder), storage_options=store.storage_options)
    except _MISSING:
        return None


def _place(store: Tables, embedder: str) -> str:
    branch = store.branch_name or "main"
    return f"{store.root}/{INDEXES}/{branch}/{content_id(embedder)}.lance"


def _length(copy: lance.LanceDataset) -> int:
    return copy.schema.field("vector").type.list_size


def _last(copy: lance.LanceDataset) -> int:
    """Return the greatest row id of `embeddings` that the copy holds."""
    greatest = pc.max(copy.to_table(columns=["row_id"]).column(0)).as_py()
    return -1 if greatest is None else int(greatest)


def length_of(store: Tables, embedder: str) -> int | None:
    """Return the length of an embedder's vectors, None before there is one."""
    condition = f"embedder = {literal(embedder)}"
    first = store.dataset("embeddings").to_table(columns=["vector"], filter=condition, limit=1)
    return len(first.column(0)[0]) if len(first) else None
