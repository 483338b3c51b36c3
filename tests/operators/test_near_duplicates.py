"""Near-duplicates: planted copies and light edits go, other problems and other numbers stay."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlake.operators import Operator, drop_near_duplicates, drop_near_embeddings
from rlake.operators.near_duplicates.minhash import Shingles
from rlake.store.errors import OperatorError

METHODS = (drop_near_duplicates, drop_near_embeddings)

_NAMES = "Anna Bruno Chiara Dmitri Elif Farid Greta Hugo Ines Jonas Kira Leo Mona Nils"
_THINGS = "apples marbles stickers pencils coins shells stamps tickets cookies books"
_PROBLEMS = (
    "{a} has {x} {t} and buys {y} more at the market on the way home. Then {a} gives {z} of them "
    "to {b}. How many {t} does {a} have now?",
    "A shop sells {t} in boxes of {x}. {a} buys {y} boxes and {b} buys {z} boxes for the party. "
    "How many {t} do they carry out of the shop together?",
    "{a} saves {x} dollars every week, while {b} saves {y} dollars. After {z} weeks they put their "
    "money together for a journey. How many dollars do they have?",
    "It takes {a} {x} minutes to paint one chair and {b} {y} minutes to paint another. How long do "
    "the two of them need for {z} chairs when each works without a pause?",
)
_SYLLABLES = "ba ke li mo nu ra se ti vo za pel dor min kas tul fen gri hol"


def _story(rng: random.Random) -> str:
    """A text without numbers that is like no other."""
    words = ["".join(rng.choices(_SYLLABLES.split(), k=rng.randint(1, 3))) for _ in range(30)]
    return " ".join(words).capitalize() + "."


def _problem(rng: random.Random) -> str:
    """One of few problems with numbers of its own: unlike the others in little else."""
    a, b = rng.sample(_NAMES.split(), 2)
    x, y, z = rng.sample(range(2, 98), 3)
    return rng.choice(_PROBLEMS).format(a=a, b=b, t=rng.choice(_THINGS.split()), x=x, y=y, z=z)


def _typo(rng: random.Random, text: str) -> str:
    place = rng.choice([i for i in range(len(text) - 1) if text[i : i + 2].isalpha()])
    match rng.randrange(3):
        case 0:
            return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
        case 1:
            return text[:place] + text[place + 1 :]
        case _:
            return text[:place] + rng.choice("aeinrst") + text[place:]


def _swapped(rng: random.Random, text: str) -> str:
    words = text.split(" ")
    i = rng.randrange(len(words) - 1)
    words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


def _edited(rng: random.Random, text: str) -> str:
    """A copy: as it is, or with up to four light edits."""
    for _ in range(rng.randint(0, 4)):
        match rng.randrange(5):
            case 0:
                text = text.upper() if rng.random() < 0.2 else text.lower()
            case 1:
                text = text.replace(" ", "  ", rng.randint(1, 9)) + "\n"
            case 2:
                text = _swapped(rng, text)
            case _:
                text = _typo(rng, text)
    return text


def planted(seed: int) -> tuple[list[str], list[int]]:
    """Return texts in random order, and the cluster of each: 400 of one text, 150 of 2 to 5."""
    rng = random.Random(seed)
    made: dict[tuple[str, ...], str] = {}
    while len(made) < 550:
        text = _problem(rng) if len(made) % 2 else _story(rng)
        numbers = tuple(sorted(w for w in text.split() if w.isdigit()))
        made.setdefault(numbers or (text,), text)  # the same numbers twice would be by chance
    texts = [(text, i) for i, text in enumerate(made.values())]
    for i, text in enumerate(list(made.values())[:150]):
        texts += [(_edited(rng, text), i) for _ in range(rng.randint(1, 4))]
    rng.shuffle(texts)
    return [text for text, _ in texts], [cluster for _, cluster in texts]


def frame(texts: Sequence[str | None], **columns: Any) -> pl.DataFrame:
    ids = [f"e{i:04d}" for i in range(len(texts))]
    return pl.DataFrame({"experience_id": ids, "response_text": texts, **columns})


def named_by(op: Operator, rows: pl.DataFrame) -> dict[int, int]:
    """Return which row each dropped row is said to be alike."""
    dropped = op.apply(rows).dropped
    return {
        int(i[1:]): int(reason.removeprefix("alike e")[:4]) for i, reason in dropped.iter_rows()
    }


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_planted_copies_and_light_edits_are_found_and_other_problems_stay(method: Any) -> None:
    for seed in (11, 12, 13, 14, 15):
        texts, clusters = planted(seed)
        firsts = {cluster: i for i, cluster in reversed(list(enumerate(clusters)))}
        copies = {i for i, cluster in enumerate(clusters) if firsts[cluster] != i}
        found = named_by(method(), frame(texts))
        right = [i for i, other in found.items() if i in copies and clusters[i] == clusters[other]]
        assert len(right) > 0.95 * len(found)  # precision
        assert len(right) > 0.95 * len(copies)  # recall


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_later_rows_never_change_what_became_of_earlier_ones(method: Any) -> None:
    texts, _ = planted(21)
    whole = named_by(method(same_numbers=False), frame(texts))
    assert len(whole) > 300
    for count in (100, 640):
        part = named_by(method(same_numbers=False), frame(texts[:count]))
        assert part == {i: other for i, other in whole.items() if i < count}
    assert not set(whole.values()) & set(whole)


def _pieces(text: str) -> set[str]:
    return {f" {text} "[i : i + 4] for i in range(len(text) - 1)}


def _jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other)


def test_each_row_goes_that_is_alike_an_earlier_kept_row_and_no_other() -> None:
    texts = [" ".join(text.lower().split()) for text in planted(31)[0][:400]]
    sets = [_pieces(text) for text in texts]
    expected: dict[int, int] = {}
    for i in range(len(texts)):
        kept = (j for j in range(i) if j not in expected)
        first = next((j for j in kept if _jaccard(sets[i], sets[j]) >= 0.7), None)
        if first is not None:
            expected[i] = first
    assert named_by(drop_near_duplicates(same_numbers=False), frame(texts)) == expected


def test_the_similarity_in_the_reason_is_exact_for_both_methods() -> None:
    one, other = "carry the one and add 4", "carry the one and add  4!"
    reason = drop_near_duplicates().apply(frame([one, other])).dropped["reason"][0]
    share = _jaccard(_pieces(one), _pieces(other.replace("  ", " ")))
    assert reason == (
        f"alike e0000: {share:.2f} of their 4-character pieces are the same, 0.7 is enough"
    )
    a, b = np.array([3.0, 4.0, 1.0]), np.array([3.0, 4.0, 2.0])
    rows = frame(["x", "y"], vector=[a.tolist(), b.tolist()])
    reason = drop_near_embeddings(column="vector").apply(rows).dropped["reason"][0]
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert reason == f"alike e0000: their vectors have a cosine of {cosine:.2f}, 0.9 is enough"


def test_the_share_of_equal_numbers_of_signatures_estimates_the_similarity() -> None:
    letters = random.Random(0).choices("abcdefghij", k=4000)
    texts = ["".join(letters[i : i + 1000]) for i in (0, 100, 200, 400, 800)]
    shingles = Shingles(texts, length=6)
    for other in range(1, len(texts)):
        estimate = np.mean(shingles.signatures[0] == shingles.signatures[other])
        exact = shingles.jaccard(0, other)
        assert abs(estimate - exact) < 4 * np.sqrt(exact * (1 - exact) / 160)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_other_numbers_make_another_text_unless_they_are_not_looked_at(method: Any) -> None:
    texts = ["Tom has 12 pears and eats 3 of them.", "Tom has 13 pears and eats 2 of them."]
    assert named_by(method(), frame(texts)) == {}
    assert named_by(method(same_numbers=False, threshold=0.6), frame(texts)) == {1: 0}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_rows_are_compared_within_their_group_or_task_and_blank_ones_with_none(method: Any) -> None:
    rows = frame(
        ["ok", "ok", "OK ", "ok", None, None, " ", " ", "a", "a"],
        task_id=list("tttuttttvv"),
        group_id=list("gghikkkkll"),
    )
    assert named_by(method(), rows) == {1: 0, 2: 0, 3: 0, 9: 8}
    assert named_by(method(within="task"), rows) == {1: 0, 2: 0, 9: 8}
    assert named_by(method(within="group"), rows) == {1: 0, 9: 8}
    assert (method(within="group").scope, method().scope) == ("group", "all")
    assert method(within="task").reads == ("response_text", "task_id")


def test_vectors_of_zeros_are_alike_none_and_those_of_several_lengths_are_told() -> None:
    rows = frame(["x"] * 4, vector=[[0.0, 0.0], [0.0, 0.0], None, [1.0, 0.0]])
    assert drop_near_embeddings(column="vector").apply(rows).dropped.is_empty()
    rows = frame(["x"] * 2, vector=[[1.0], [1.0, 0.0]])
    with pytest.raises(OperatorError, match=r"vectors of \[1, 2\] numbers"):
        rows.pipe(drop_near_embeddings(column="vector"))


def test_many_vectors_that_may_be_alike_are_compared_block_by_block() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(1500, 8))
    vectors = np.concatenate([base, base[::3] * rng.uniform(0.5, 2.0, (500, 1))])
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    expected: dict[int, int] = {}
    for i in range(len(units)):
        near = np.flatnonzero(np.round(units[:i] @ units[i], 6) >= 0.99)
        first = next((int(j) for j in near if j not in expected), None)
        if first is not None:
            expected[i] = first
    assert len(expected) >= 500
    rows = frame(["x"] * len(vectors), vector=vectors.tolist())
    assert named_by(drop_near_embeddings(column="vector", threshold=0.99), rows) == expected


def test_numbers_are_not_compared_as_texts() -> None:
    with pytest.raises(OperatorError, match="`score` is Float64, expected texts"):
        frame(["a"], score=[1.0]).pipe(drop_near_duplicates(column="score"))
