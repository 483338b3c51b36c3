"""Finding: responses by their words, and experiences by their likeness to another."""

from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest
from support.builders import experiences

from rlake.operators.embed import hashed_ngrams
from rlake.pipelines import embed as embed_module
from rlake.pipelines.embed import embed
from rlake.store import Experience, Store, embeddings
from rlake.store.errors import NotFoundError, OperatorError, QueryError
from rlake.store.maintenance import indexes, retention
from rlake.store.maintenance.indexes import Index

TEXTS = (
    "add the units, then carry the one",
    "Add the units and then carry one",
    "multiply both numbers first",
    "multiply the numbers, both of them",
    "no idea",
)


def tell(store: Store, texts: Sequence[str | None], *, first: int = 0) -> None:
    """Store one try for each text, e0, e1, ...; every second one is right."""
    made = [
        Experience(
            task_id="t",
            group_id="g",
            experience_id=f"e{i}",
            rollout_index=i,
            response_text=text,
            reward=float(i % 2),
        )
        for i, text in enumerate(texts, first)
    ]
    store.append("experiences", made)


def ids(found: pl.DataFrame) -> list[str]:
    return found["experience_id"].to_list()


def test_responses_are_found_by_their_words(store: Store) -> None:
    tell(store, TEXTS)
    found = store.search("carry")
    assert sorted(ids(found)) == ["e0", "e1"]
    assert found["score"].to_list() == sorted(found["score"], reverse=True)
    assert found["response_text"][0] in TEXTS[:2]
    assert ids(store.search("carry", k=1)) == ids(found)[:1]
    assert ids(store.search("carry", where="reward = 1")) == ["e1"]
    assert ids(store.search("quaternion")) == []


def test_the_best_are_found_where_a_condition_leaves_few(store: Store) -> None:
    tell(store, [f"carry the one {i}" for i in range(400)])
    found = store.search("carry", k=2, where="rollout_index IN (333, 399) OR reward > 1")
    assert sorted(ids(found)) == ["e333", "e399"]


def test_rows_newer_than_the_index_are_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "INDEXES", (Index("experiences", "response_text", "INVERTED", 1),))
    tell(store, TEXTS)
    store.maintain()
    store.snapshot("then")
    assert indexes.new_rows("experiences", store.dataset("experiences")) == 0
    tell(store, ["carry the ten"], first=5)
    assert indexes.new_rows("experiences", store.dataset("experiences")) == 1
    found = store.search("carry")
    assert sorted(ids(found)) == ["e0", "e1", "e5"]
    store.maintain()
    assert ids(store.search("carry")) == ids(found)
    assert sorted(ids(store.at("then").search("carry"))) == ["e0", "e1"]


def test_alike_responses_are_found(store: Store) -> None:
    tell(store, TEXTS)
    assert embed(store).rows == 5
    found = store.similar("e0", k=3)
    assert ids(found)[0] == "e1"
    assert "e0" not in ids(found)
    assert found["score"][0] > 0.7 > found["score"][1]
    assert ids(store.similar("e2", k=1)) == ["e3"]
    assert ids(store.similar("e0", k=10, where="reward = 0"))[0] in ("e2", "e4")
    assert len(store.similar("e0", k=10)) == 4


def test_forgotten_experiences_are_not_found(store: Store) -> None:
    tell(store, TEXTS)
    embed(store)
    retention.add(store, "one", table="experiences", where="experience_id = 'e1'")
    store.maintain()
    assert "e1" not in ids(store.similar("e0"))
    assert ids(store.search("carry")) == ["e0"]


def test_only_rows_without_a_vector_are_embedded(store: Store) -> None:
    tell(store, [*TEXTS, None, "  "])
    done = embed(store, where="rollout_index < 3")
    assert (done.rows, done.already, done.without_text) == (3, 0, 0)
    done = embed(store)
    assert (done.embedder, done.rows, done.already) == ("hashed_ngrams@1", 2, 3)
    assert (done.without_text, done.length) == (2, 256)
    assert embed(store).rows == 0
    assert store.count("embeddings") == 5
    made_by = "SELECT count(DISTINCT lineage_id) FROM embeddings JOIN lineage USING (lineage_id)"
    assert store.sql(made_by).fetchall() == [(2,)]


def test_texts_are_embedded_in_bounded_batches(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_module, "_BYTES", 64)
    tell(store, TEXTS)
    seen: list[tuple[int, int]] = []
    embed(store, listener=lambda done, todo: seen.append((done, todo)))
    assert [done for done, _ in seen] == [1, 3, 5]
    assert {todo for _, todo in seen} == {5}
    stored = store.scan("embeddings").collect().sort("experience_id")["vector"].to_list()
    assert np.array_equal(np.array(stored, np.float32), hashed_ngrams(TEXTS))


def lengths(texts: Sequence[str]) -> np.ndarray:
    """An embedder of its own: how long a text is, and how many words it has."""
    return np.array([[len(text), len(text.split())] for text in texts], np.float32)


def wrong_shape(texts: Sequence[str]) -> np.ndarray:
    return np.zeros(len(texts))


def not_a_number(texts: Sequence[str]) -> np.ndarray:
    return np.full((len(texts), 2), np.nan)


def broken(texts: Sequence[str]) -> np.ndarray:
    raise RuntimeError(f"no model for {len(texts)} texts")


def test_any_function_embeds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    tell(store, TEXTS)
    done = embed(store, "mine:lengths")
    assert done.embedder.startswith("mine:lengths@")
    assert store.similar("e0", k=1)["score"][0] == pytest.approx(1, abs=0.05)
    embed(store)
    with pytest.raises(QueryError, match="embeddings by `hashed_ngrams@1`, `mine:lengths@"):
        store.similar("e0")
    assert ids(store.similar("e0", k=1, embedder="hashed_ngrams")) == ["e1"]
    assert len(store.similar("e0", embedder=done.embedder)) == 4
    for name, words in (
        ("wrong_shape", r"shape \[5\], expected \[5, length\]"),
        ("not_a_number", "NaN or infinity"),
        ("broken", "RuntimeError: no model for 5 texts"),
        ("brokn", "did you mean `broken`"),
    ):
        with pytest.raises(OperatorError, match=words):
            embed(store, f"mine:{name}")


def test_what_cannot_be_found_is_told_with_the_way_out(store: Store) -> None:
    tell(store, TEXTS[:3])
    with pytest.raises(NotFoundError, match="no embeddings yet; make them with `rlake embed`"):
        store.similar("e0")
    embed(store, where="rollout_index < 2")
    with pytest.raises(NotFoundError, match="no experience `f1`; did you mean `e1`"):
        store.similar("f1")
    with pytest.raises(NotFoundError, match=r"`e2` has no vector by .*; make it with `rlake embed"):
        store.similar("e2")
    with pytest.raises(NotFoundError, match="by `hashed`"):
        store.similar("e0", embedder="hashed")
    with pytest.raises(QueryError, match="`k` must be 1 to 1000, got 0"):
        store.similar("e0", k=0)
    with pytest.raises(QueryError, match="`k` must be 1 to 1000, got 0"):
        store.search("carry", k=0)
    with pytest.raises(QueryError, match="is empty"):
        store.search("  ")
    with pytest.raises(QueryError, match="did you mean"):
        store.search("carry", where="rewrad > 1")
    with pytest.raises(OperatorError, match="no embedder `hashed_ngram`; did you mean"):
        embed(store, "hashed_ngram")


def test_vectors_of_two_lengths_by_one_embedder_are_refused(store: Store) -> None:
    tell(store, TEXTS[:2])
    rows = [("e0", [1.0, 0.0]), ("e1", [1.0, 0.0, 0.0])]
    store.append(
        "embeddings", [{"experience_id": i, "embedder": "x", "vector": v} for i, v in rows]
    )
    with pytest.raises(QueryError, match="vectors of `x` have 2 and 3 numbers"):
        store.similar("e0")


def test_a_vector_of_zeros_is_like_nothing(store: Store) -> None:
    tell(store, TEXTS[:2])
    rows = [("e0", [0.0, 0.0]), ("e1", [1.0, 0.0])]
    store.append(
        "embeddings", [{"experience_id": i, "embedder": "x", "vector": v} for i, v in rows]
    )
    with pytest.raises(QueryError, match="is zero"):
        store.similar("e0")
    assert store.similar("e1")["score"].to_list() == [0.0]


def test_hashed_ngrams_are_the_same_on_every_machine() -> None:
    vector = hashed_ngrams(["carry the one"], dims=8)[0]
    counted = np.array([1, -1, 0, -2, 2, -2, 2, -1])
    assert np.array_equal(
        vector, (np.sign(counted) * np.sqrt(abs(counted) / 11)).astype(np.float32)
    )
    assert np.array_equal(hashed_ngrams(["", " \n"]), np.zeros((2, 256)))
    assert np.linalg.norm(hashed_ngrams(["né 数字 \ud800"])) == pytest.approx(1)
    batch = hashed_ngrams(TEXTS)
    assert np.array_equal(batch, np.concatenate([hashed_ngrams([t]) for t in TEXTS]))


def clustered(n: int, *, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(0).normal(size=(40, 32))
    return (centers[rng.integers(0, 40, n)] + 0.6 * rng.normal(size=(n, 32))).astype(np.float32)


def place(store: Store, given: np.ndarray, *, first: int = 0) -> None:
    """Store vectors of their own with one try each."""
    names = [f"e{i:05d}" for i in range(first, first + len(given))]
    [one] = experiences(1)
    rows = pl.DataFrame({"experience_id": names}).with_columns(
        task_id=pl.lit(one.task_id),
        group_id=pl.lit("g"),
        rollout_index=0,
        source=pl.lit("imported"),
    )
    store.append("experiences", rows)
    made = pl.DataFrame({"experience_id": names, "vector": given.tolist()})
    store.append("embeddings", made.with_columns(embedder=pl.lit("x")))


def test_indexed_search_agrees_with_exact_search(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "WORTH_ROWS", 3000)
    place(store, clustered(3000, seed=1))
    asked = [f"e{i:05d}" for i in range(0, 3000, 150)]
    exact = {i: ids(store.similar(i)) for i in asked}
    store.maintain()
    assert store.folder is not None
    assert len(list((store.folder / ".indexes" / "main").iterdir())) == 1
    found = {i: ids(store.similar(i)) for i in asked}
    recall = np.mean([len({*found[i]} & {*exact[i]}) / 10 for i in asked])
    assert recall >= 0.95
    # what came since is compared exactly
    near = embeddings.vector_of(store, "x", "e00000")
    assert near is not None
    place(store, (near * 2)[None], first=9000)
    assert store.similar("e00000")["experience_id"][0] == "e09000"
    assert store.similar("e00000")["score"][0] == pytest.approx(1)
    store.maintain()
    assert store.similar("e00000")["experience_id"][0] == "e09000"
    # what is forgotten is not found, though the index knows it
    retention.add(store, "new", table="embeddings", where="experience_id >= 'e09'")
    store.maintain()
    assert store.similar("e00000")["experience_id"][0] == exact["e00000"][0]
