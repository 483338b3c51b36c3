"""Queues of rows to label: what they hold, who gets what, and what labels come to."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from support.builders import experiences

from rlake.loop.labeling import Choice, Item, Question, Queue, adjudicate, parse_choices, progress
from rlake.store import Store
from rlake.store.errors import ConfigError, NotFoundError, QueryError

GOOD, BAD = Choice("good", 1.0), Choice("bad", 0.0)
QUESTION = Question("Is it good?", (GOOD, BAD))


def queue(store: Store, **options: object) -> Queue:
    settings = {"name": "q", "question": QUESTION} | options
    return Queue.chosen(store, **settings)  # pyright: ignore[reportArgumentType]


def labelled(store: Store, name: str, said: dict[str, dict[str, str]]) -> None:
    """Store labels, by person and experience."""
    made = Queue(name, QUESTION, ())
    for who, labels in said.items():
        for experience, label in labels.items():
            made.add(store, Item(experience), who, Choice(label, float(label == "good")))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("good", "2 to 20 different"),
        ("a,a", "different ones"),
        ("a=x,b=0", "must be a number, got `x`"),
        ("1..900", "2 to 20"),
        ("=1,b", "1 to 40 characters"),
    ],
)
def test_choices_that_are_none_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_choices(text)


def test_the_borderline_is_where_a_group_is_half_right(store: Store) -> None:
    rewards = [1.0] * 4 + [1.0, 1.0, 0.0, 0.0] + [1.0, 1.0, 1.0, 0.0]
    store.append("experiences", experiences(12, reward=rewards))
    found = [i.experience_id[:4] for i in queue(store, kind="borderline").items]
    assert found == ["g001"] * 4 + ["g002"] * 4  # of g000 all are right


def test_disagreements_come_widest_first(store: Store) -> None:
    store.append("experiences", experiences(4, reward=[1.0, 0.0, 1.0, 0.0]))
    verdicts = {"g000/00": 0.0, "g000/01": 0.25, "g000/02": 1.0}
    store.append(
        "scores",
        [
            {"experience_id": i, "scorer": "judge", "scorer_version": "1", "value": v}
            for i, v in verdicts.items()
        ],
    )
    found = [i.experience_id for i in queue(store, kind="disagreements").items]
    assert found == ["g000/00", "g000/01"]


def test_the_same_seed_gives_the_same_queue(store: Store) -> None:
    store.append("experiences", experiences(40, reward=1.0))
    first = queue(store, limit=10).items
    assert queue(store, limit=10).items == first
    assert queue(store, limit=10, seed=1).items != first


def test_pairs_are_tries_of_one_group_that_answer_differently(store: Store) -> None:
    store.append("experiences", experiences(8, reward=[1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]))
    [pair] = queue(store, in_pairs=True).items
    assert {pair.experience_id[:4], (pair.compared_id or "")[:4]} == {"g000"}
    texts = dict(store.sql("SELECT experience_id, response_text FROM experiences").fetchall())
    assert texts[pair.experience_id] != texts[pair.compared_id]


def test_a_query_without_ids_an_empty_queue_and_a_bad_condition_are_told(store: Store) -> None:
    store.append("experiences", experiences(4, reward=1.0))
    with pytest.raises(ConfigError, match="must return `experience_id`"):
        queue(store, sql="SELECT reward FROM experiences")
    with pytest.raises(NotFoundError, match="queue `q` is empty"):
        queue(store, where="reward > 1")
    with pytest.raises(QueryError):
        queue(store, where="reward >")


def test_an_item_is_done_when_it_has_its_reviews(store: Store) -> None:
    store.append("experiences", experiences(12, reward=1.0))
    made = queue(store, reviews=2)
    first, other = made.next(store, "ann"), made.next(store, "bob")
    assert first is not None
    assert first != other, "people who begin at one time seldom meet"
    made.add(store, first, "ann", GOOD)
    assert vars(progress(made, store, "ann")) == {"items": 12, "done": 0, "labels": 1, "mine": 1}
    assert made.next(store, "bob") == first
    made.add(store, first, "bob", GOOD)
    assert progress(made, store, "cyd").done == 1


def test_nobody_gets_an_item_twice_and_each_gets_its_reviews(store: Store) -> None:
    store.append("experiences", experiences(12, reward=1.0))
    made, seen = queue(store, reviews=2), Counter[tuple[str, Item]]()
    people = ["ann", "bob", "cyd"]
    while left := [who for who in people if made.next(store, who)]:
        for who in left:
            item = made.next(store, who)
            if item is not None:
                seen[who, item] += 1
                made.add(store, item, who, GOOD)
    assert set(seen.values()) == {1}
    assert Counter(item for _, item in seen) == dict.fromkeys(made.items, 2)
    assert progress(made, store, "ann").done == 12


def test_an_item_whose_row_was_deleted_is_passed_over(store: Store) -> None:
    store.append("experiences", experiences(3, reward=1.0))
    made = queue(store, reviews=2)
    made.add(store, made.items[0], "ann", GOOD)
    gone = made.items[0].experience_id
    store.dataset("experiences").delete(f"experience_id = '{gone}'")
    assert made.next(store, "bob") in made.items[1:]
    assert set(queue(store, reviews=2).items) == set(made.items[1:])
    with pytest.raises(NotFoundError, match="is empty"):
        queue(store, sql="SELECT 'x' AS experience_id", name="other")


def test_what_somebody_skips_comes_to_others(store: Store) -> None:
    store.append("experiences", experiences(1, reward=1.0))
    made = queue(store)
    [item] = made.items
    made.add(store, item, "ann", None)
    assert made.next(store, "ann") is None
    assert made.next(store, "bob") == item


def test_an_item_that_was_begun_stays_when_the_query_forgets_it(store: Store) -> None:
    store.append("experiences", experiences(4, reward=[1.0, 0.0, 0.0, 0.0]))
    first = queue(store, where="reward = 1", reviews=2)
    first.add(store, first.items[0], "ann", GOOD)
    later = queue(store, where="reward = 0", reviews=2)
    assert first.items[0] in later.items
    assert later.next(store, "bob") == first.items[0]


def alpha(items: list[list[str]]) -> float:
    """Krippendorff's alpha for nominal data, from the coincidence matrix of its definition."""
    names = sorted({v for item in items for v in item})
    matrix = np.zeros((len(names), len(names)))
    for item in (i for i in items if len(i) > 1):
        for a in range(len(item)):
            for b in range(len(item)):
                if a != b:
                    matrix[names.index(item[a]), names.index(item[b])] += 1 / (len(item) - 1)
    n_c, n = matrix.sum(axis=1), matrix.sum()
    observed = n - np.trace(matrix)
    expected = (n * n - (n_c**2).sum()) / (n - 1)
    return 1 - observed / expected


def kappa(one: list[str], other: list[str]) -> float:
    names = sorted({*one, *other})
    observed = float(np.mean([a == b for a, b in zip(one, other, strict=True)]))
    expected = sum((one.count(n) / len(one)) * (other.count(n) / len(other)) for n in names)
    return (observed - expected) / (1 - expected)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agreement_is_as_its_definitions_say(store: Store, seed: int) -> None:
    store.append("experiences", experiences(30, reward=1.0))
    ids = sorted(store.scan("experiences").collect()["experience_id"])
    rng = np.random.default_rng(seed)
    said = {
        who: {
            i: str(rng.choice(["good", "bad", "odd"], p=[0.6, 0.3, 0.1]))
            for i in rng.permutation(ids)[:20]
        }
        for who in ("ann", "bob", "cyd")
    }
    labelled(store, "q", said)
    labelled(store, "other", {"ann": {ids[0]: "good"}, "bob": {ids[0]: "bad"}})
    items = [[said[w][i] for w in said if i in said[w]] for i in ids]
    [row] = store.sql("SELECT * FROM agreement WHERE queue = 'q'").pl().to_dicts()
    several = [i for i in items if len(i) > 1]
    agreement = np.mean([np.mean([a == b for a, b in combinations(i, 2)]) for i in several])
    assert row["num_items"] == len(several)
    assert row["agreement"] == pytest.approx(agreement, rel=1e-12)
    assert row["alpha"] == pytest.approx(alpha(items), rel=1e-12)
    for two in store.sql("SELECT * FROM pairwise_agreement WHERE queue = 'q'").pl().to_dicts():
        a, b = said[two["annotator"]], said[two["other_annotator"]]
        both = [i for i in ids if i in a and i in b]
        assert two["num_items"] == len(both)
        expected = kappa([a[i] for i in both], [b[i] for i in both])
        assert two["kappa"] == pytest.approx(expected, rel=1e-12)


def test_a_person_who_thinks_again_counts_once(store: Store) -> None:
    store.append("experiences", experiences(1, reward=1.0))
    made = queue(store)
    for choice in (GOOD, BAD):
        made.add(store, made.items[0], "ann", choice)
    assert store.sql("SELECT label FROM labels").fetchall() == [("bad",)]


def test_the_majority_becomes_a_label_that_a_run_can_train_on(store: Store) -> None:
    store.append("experiences", experiences(3, reward=0.0))
    labelled(
        store,
        "q",
        {
            "ann": {"g000/00": "good", "g000/01": "good", "g000/02": "bad"},
            "bob": {"g000/00": "good", "g000/01": "bad"},
            "cyd": {"g000/00": "bad"},
        },
    )
    assert vars(adjudicate(store, "q", reviews=2)) == {
        "labels": 1, "preferences": 0, "ties": 1, "waiting": 1,
    }  # fmt: skip
    assert adjudicate(store, "q", reviews=2).labels == 0
    tie = "SELECT label, score FROM adjudicated WHERE experience_id = 'g000/01'"
    assert store.sql(tie).fetchall() == [(None, None)]
    rows = store.scan("experiences", with_columns=["reward=feedback:score@majority"]).collect()
    assert dict(rows.select("experience_id", "reward").rows())["g000/00"] == 1.0
    assert rows["reward"].null_count() == 2
    assert store.sql("SELECT num_annotators FROM agreement").fetchall() == [(3,)]


def test_a_majority_that_changes_back_is_settled_again(store: Store) -> None:
    store.append("experiences", experiences(1, reward=0.0))
    for said in ("good", "bad", "good"):
        labelled(store, "q", {"ann": {"g000/00": said}})
        assert (adjudicate(store, "q").labels, adjudicate(store, "q").labels) == (1, 0)
        rows = store.scan("experiences", with_columns=["label=feedback:label@majority"]).collect()
        assert rows["label"].to_list() == [said]


def test_a_number_means_a_label_of_that_name_or_else_a_place() -> None:
    named, placed = Question("?", parse_choices("0..4")), Question("?", parse_choices("good,bad"))
    assert (named.meant("1"), placed.meant("1")) == (named.choices[1], placed.choices[0])
    assert (named.meant("5"), placed.meant("3"), named.meant("odd")) == (None, None, None)
    assert (named.keyed(1), placed.keyed(2)) == ("0", "2 bad")


def test_pairs_that_people_compared_become_preferences(store: Store) -> None:
    store.append("experiences", experiences(4, reward=[1.0, 0.0, 0.0, 0.0]))
    made = queue(store, in_pairs=True)
    [item] = made.items
    made.add(store, item, "ann", made.question.meant("second"))
    assert adjudicate(store, "q").preferences == 1
    [row] = store.scan("preferences").collect().to_dicts()
    assert (row["chosen_id"], row["rejected_id"]) == (item.compared_id, item.experience_id)
    assert row["source"] == "human queue q"
    assert adjudicate(store, "q").preferences == 0
    rows = store.scan("experiences", with_columns=["feedback:label"]).collect()
    assert rows["label"].null_count() == 4  # a comparison is no label of either
