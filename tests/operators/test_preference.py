"""Pairs, best rows, rejection sampling and KTO's labels: what is made, and why nothing is."""

import json
import math
from collections import Counter
from itertools import combinations, permutations
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import experiences, rows, table

from rlake.operators import kto_labels, pairs, rejection_sample, top_k
from rlake.operators.statistics import seeded_uniform
from rlake.pipelines import Pipeline, Table
from rlake.store import Store
from rlake.store.conversation import PARTED, why_no_pair
from rlake.store.ids import content_id


def tries(*rewards: float | None, size: int | None = None, **columns: Any) -> pl.DataFrame:
    """Return rows with these rewards and replies that differ, in groups of `size`."""
    made = experiences(len(rewards), reward=rewards, group_size=size or len(rewards), **columns)
    texts = columns.get("response_text")
    replies = pl.format("reply {}", "rollout_index") if texts is None else pl.lit(texts)
    return rows(made).with_columns(response_text=replies)


def named(made: pl.DataFrame) -> list[tuple[str, str, float]]:
    """Return the pairs of the first group by the last two letters of their ids."""
    return [
        (c[-2:], r[-2:], m) for c, r, m in made.select("chosen_id", "rejected_id", "margin").rows()
    ]


def test_max_min_pairs_the_best_with_the_worst_and_the_others_say_why_not() -> None:
    frame = tries(0.2, 1.0, 0.0, None, 1.0, 1.0, 1.0, 1.0, size=4)
    applied = pairs().apply(frame)
    assert applied.rows.drop("task_id").rows() == [
        (content_id("g000/01", "g000/02"), "g000/01", "g000/02", 1.0)
    ]
    assert dict(applied.dropped.iter_rows()) == {
        "g000/00": "others of its group were paired",
        "g000/03": "its reward is NULL",
        **dict.fromkeys(
            [f"g001/0{i}" for i in range(4)], "its group gives no pair: all rewards are 1.0"
        ),
    }


THREE = (0.5, 1.0, 0.0)
REST = [("01", "00", 0.5), ("01", "02", 1.0)]
ALL = [("00", "02", 0.5), *REST]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"strategy": "best_against_rest"}, REST),
        ({"strategy": "best_against_rest", "min_margin": 0.6}, REST[1:]),
        ({"strategy": "all"}, ALL),
        ({"strategy": "all", "min_margin": 0.5}, ALL),
        ({"strategy": "all", "min_margin": 0.51}, REST[1:]),
        ({"strategy": "all", "min_margin": -1.0}, ALL),
        ({"strategy": "all", "max_pairs": 1}, REST[1:]),
        ({"min_margin": 1.0}, REST[1:]),
        ({"min_margin": 1.1}, []),
    ],
)
def test_pairs_by_strategy_and_margin(
    params: dict[str, Any], expected: list[tuple[Any, ...]]
) -> None:
    assert named(pairs(**params)(tries(*THREE))) == expected


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 0.0), "its group gives no pair: all rewards are 0.0"),
        ((1.0, 1.0), "its group gives no pair: all rewards are 1.0"),
        ((1.0,), "its group gives no pair: it has no second reply with a reward"),
        ((None, None), "its reward is NULL"),
        ((1.0, 0.75), "its group gives no pair: rewards differ by less than 0.5"),
    ],
)
def test_a_group_that_gives_no_pair_says_why(rewards: tuple[float, ...], reason: str) -> None:
    applied = pairs(min_margin=0.5).apply(tries(*rewards))
    assert not applied.rows.height
    assert Counter(applied.dropped["reason"]) == {reason: len(rewards)}


def test_a_reward_that_is_not_finite_takes_no_part() -> None:
    frame = tries(1.0, 0.0, 0.5).with_columns(
        reward=pl.Series([1.0, math.nan, 0.5])  # as a derive may make it
    )
    applied = pairs().apply(frame)
    assert named(applied.rows) == [("00", "02", 0.5)]
    assert applied.dropped["reason"].to_list() == ["its reward is not finite"]


def test_equal_replies_are_no_pair_and_count_once() -> None:
    frame = tries(1.0, 1.0, 0.0, 0.5).with_columns(
        response_text=pl.Series(["four", "four", "five", "five"])
    )
    applied = pairs(strategy="all").apply(frame)
    assert named(applied.rows) == [("00", "03", 0.5)]
    assert applied.dropped["reason"].unique().to_list() == ["an equal reply of its group counts"]
    same = pairs(strategy="all").apply(frame.with_columns(response_text=pl.lit("four")))
    assert not same.rows.height
    assert len(named(pairs(strategy="all", distinct_by=None)(frame))) == 5


def talk(*said: str) -> str:
    turns = [{"role": "assistant", "content": text} for text in said]
    return json.dumps([{"role": "user", "content": "go"}, *turns])


def test_tries_of_many_turns_that_end_in_the_same_words_differ() -> None:
    frame = tries(1.0, 0.0, response_text="FINISH").with_columns(
        messages=pl.Series([talk("left", "FINISH"), talk("right", "FINISH")])
    )
    assert named(pairs()(frame)) == [("00", "01", 1.0)]
    applied = pairs(distinct_by="response_text").apply(frame)
    assert not applied.rows.height
    assert set(applied.dropped["reason"]) == {
        "its group gives no pair: it has no second reply with a reward",
        "an equal reply of its group counts",
    }


def test_tries_that_part_at_a_question_are_no_pair_and_say_so() -> None:
    asked, said = {"role": "user", "content": "go"}, {"role": "assistant", "content": "where?"}

    def goes_on(question: str, answer: str) -> str:
        more = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return json.dumps([asked, said, *more])

    talks = [goes_on("left", "a"), goes_on("right", "b"), goes_on("left", "c"), "[1]"]
    frame = tries(1.0, 0.0, 0.5, 0.25).with_columns(messages=pl.Series(talks))
    made = pairs(strategy="all")(frame)
    assert sorted(named(made)) == [
        ("00", "02", 0.5), ("00", "03", 0.75), ("02", "03", 0.25), ("03", "01", 0.25),
    ]  # fmt: skip
    applied = pairs().apply(frame[:2])
    assert not applied.rows.height
    assert set(applied.dropped["reason"]) == {
        "its conversation parts from others of its group at a question, not at an answer"
    }


PLAIN, CALLS = {"role": "assistant", "content": "a"}, [{"id": "c", "function": {"name": "f"}}]
SPOKEN = [
    {"role": "user", "content": "q"},
    {"role": "tool", "content": 'say "r"', "tool_call_id": "c"},
    PLAIN,
    {"content": "a", "role": "assistant"},
    {"role": "assistant", "content": "b\\ \u00e9"},
    PLAIN | {"tool_calls": CALLS},
    PLAIN | {"n": 1},
    PLAIN | {"n": 1.0},
]


@given(st.lists(st.lists(st.sampled_from(SPOKEN), min_size=1, max_size=4), min_size=2, max_size=5))
def test_conversations_part_where_their_messages_do_however_they_are_spelled(
    spoken: list[list[dict[str, object]]],
) -> None:
    talks = [[{"role": "user", "content": "go"}, *messages] for messages in spoken]
    texts = [
        json.dumps(t, ensure_ascii=bool(i % 2), separators=((",", ":") if i == 3 else None))
        for i, t in enumerate(talks)
    ]
    texts.append(texts[0][:-1])
    size = len(texts)
    frame = tries(*(float(i) for i in range(size)), size=size)
    frame = frame.with_columns(messages=pl.Series(texts))
    many = [text.count('"assistant"') > 1 for text in texts]
    parted = {
        (i, k)
        for i, k in combinations(range(size - 1), 2)
        if many[i] and many[k] and why_no_pair(talks[i], talks[k]) == PARTED
    }
    applied = pairs(strategy="all", distinct_by="messages").apply(frame)
    again = {i for i, text in enumerate(texts) if text in texts[i + 1 :]}
    expected = {
        (k, i)
        for i, k in combinations(range(size), 2)
        if (i, k) not in parted and not {i, k} & again
    }
    place = {name: i for i, name in enumerate(frame["experience_id"])}
    found = applied.rows.select("chosen_id", "rejected_id").rows()
    assert {(place[a], place[b]) for a, b in found} == expected


def test_only_the_last_steps_of_tries_are_compared_when_asked() -> None:
    steps = [f"g/0{rollout}{place}" for rollout in (0, 1) for place in ("", ".1", ".2", ".10")]
    frame = tries(*([1.0] * 4 + [0.0] * 4)).with_columns(
        experience_id=pl.Series(steps),
        rollout_index=pl.Series([0] * 4 + [1] * 4),
        group_id=pl.lit("g"),
    )
    assert len(pairs(strategy="all")(frame)) == 16
    applied = pairs(strategy="all", last_step=True).apply(frame)
    assert applied.rows.select("chosen_id", "rejected_id").rows() == [("g/00.10", "g/01.10")]
    assert Counter(applied.dropped["reason"]) == {"an earlier step of its rollout": 6}


def test_pairs_across_a_task_join_its_groups() -> None:
    frame = tries(1.0, 1.0, 0.0, 0.0, size=2).with_columns(
        task_id=pl.lit("t"), response_text=pl.Series(list("abcd"))
    )
    assert not len(pairs()(frame))
    assert pairs(within="task")(frame).select("chosen_id", "rejected_id").rows() == [
        ("g000/00", "g001/00")
    ]
    assert (pairs().scope, pairs(within="task").scope) == ("group", "all")


grouped = st.lists(
    st.tuples(st.integers(0, 1), st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=12
)


def of_groups(made: list[tuple[int, float | None]]) -> pl.DataFrame:
    return table(
        {
            "reward": reward,
            "experience_id": f"e{(i * 7) % 13:02d}",
            "group_id": f"g{group}",
            "response_text": f"{i}",
        }
        for i, (group, reward) in enumerate(made)
    )


def every_pair(frame: pl.DataFrame, min_margin: float) -> set[tuple[str, str]]:
    """Return all pairs by definition."""
    told = frame.select("group_id", "experience_id", "reward").rows()
    return {
        (a, b)
        for (g, a, ra), (h, b, rb) in permutations(told, 2)
        if g == h and None not in (ra, rb) and ra > rb and ra - rb >= min_margin
    }


@settings(max_examples=40)
@given(made=grouped, min_margin=st.sampled_from([0.0, 0.25, 0.5]), seed=st.integers(0, 9))
def test_every_strategy_gives_pairs_where_there_are_some_and_only_such(
    made: list[tuple[int, float | None]], min_margin: float, seed: int
) -> None:
    frame = of_groups(made)
    group_of = dict(frame.select("experience_id", "group_id").iter_rows())
    expected = every_pair(frame, min_margin)
    for strategy in ("max_min", "best_against_rest", "all", "random"):
        op = pairs(strategy=strategy, min_margin=min_margin, seed=seed)
        found = op(frame)
        ids = set(found.select("chosen_id", "rejected_id").iter_rows())
        assert len(ids) == found.height
        assert ids <= expected
        assert {group_of[a] for a, _ in ids} == {group_of[a] for a, _ in expected}
        assert ids == expected or strategy != "all"
        mixed = frame.sample(fraction=1.0, shuffle=True, seed=seed)
        again = op(mixed)
        assert again.sort("preference_id").equals(found.sort("preference_id"))
        # as the rows stand, so that parts of them one after another give the same
        places = {name: i for i, name in enumerate(mixed["experience_id"])}
        order = [(places[chosen], rejected) for _, _, chosen, rejected, _ in again.rows()]
        assert order == sorted(order)


def test_rows_without_a_group_are_one_group() -> None:
    frame = tries(1.0, 0.0, size=2).with_columns(group_id=pl.lit(None, pl.String))
    assert named(pairs()(frame)) == [("00", "01", 1.0)]
    assert top_k()(frame).height == 1


def test_all_pairs_of_a_large_group_are_bounded_and_are_not_of_one_row() -> None:
    frame = tries(*([1.0] * 300 + [0.0] * 300))
    made = pairs(strategy="all")(frame)
    assert made.height == 100
    assert made["chosen_id"].n_unique() > 10
    assert made["rejected_id"].n_unique() > 10
    widest = tries(*[float(i) for i in range(200)])
    margins = pairs(strategy="all", max_pairs=10)(widest)["margin"].sort(descending=True)
    assert margins.to_list() == [199, 198, 198, 197, 197, 197, 196, 196, 196, 196]


def test_random_pairs_are_spread_over_all_pairs() -> None:
    frame = tries(0.0, 1.0, 2.0, 3.0)
    groups = pl.concat(
        [
            frame.with_columns(
                group_id=pl.lit(f"g{i}"),
                experience_id=pl.format("{}/{}", pl.lit(i), "rollout_index"),
            )
            for i in range(600)
        ]
    )
    made = pairs(strategy="random")(groups)
    told = zip(made["chosen_id"].str.tail(1), made["rejected_id"].str.tail(1), strict=True)
    counts = Counter(told)
    assert sum(counts.values()) == 600
    assert len(counts) == 6
    assert all(abs(n - 100) < 4 * math.sqrt(100) for n in counts.values())


def test_pairs_of_the_latest_policy_come_from_a_where(store: Store) -> None:
    old = experiences(2, reward=(1.0, 0.0), policy_version=1)
    new = experiences(2, reward=(1.0, 0.0), policy_version=2)
    renamed = [
        {**one.row(), "experience_id": f"new{i}", "group_id": "new"} for i, one in enumerate(new)
    ]
    store.append("experiences", old)
    store.append("experiences", rows(old).clear().vstack(_typed(renamed)))
    latest = "policy_version = (SELECT max(policy_version) FROM experiences)"
    chain = Pipeline(
        name="latest",
        source=Table("experiences", where=latest),
        operators=[pairs()],
        sink=Table("preferences"),
    )
    chain.run(store)
    assert store.sql("SELECT chosen_id, rejected_id FROM preferences").fetchall() == [
        ("new0", "new1")
    ]


def _typed(made: list[dict[str, Any]]) -> pl.DataFrame:
    plain = rows(experiences(len(made)))
    given = [pl.Series(n, [r[n] for r in made], plain.schema[n]) for n in made[0]]
    return plain.with_columns(given)


def test_top_k_keeps_the_best_of_each_group_and_says_why_not_the_others() -> None:
    frame = tries(0.5, 1.0, None, 0.9, 0.1, 0.2, 0.2, 0.0, size=4).with_columns(
        response_text=pl.Series(["a", "b", "c", "d", "a", "b", "b", "d"])
    )
    op = top_k(k=2, min_value=0.2, distinct_by="messages")
    applied = op.apply(frame)
    assert applied.rows["experience_id"].to_list() == ["g000/01", "g000/03", "g001/01"]
    assert applied.rows.columns == frame.columns
    assert dict(applied.dropped.iter_rows()) == {
        "g000/00": "rank 3 of 3 by reward in its group; the first 2 are kept",
        "g000/02": "its reward is NULL",
        "g001/00": "its reward is below 0.2",
        "g001/02": "an equal reply of its group counts",
        "g001/03": "its reward is below 0.2",
    }


def test_top_k_of_a_task_takes_the_best_of_its_groups() -> None:
    frame = tries(0.5, 1.0, 0.9, 0.1, size=2).with_columns(
        task_id=pl.lit("t"), response_text=pl.Series(list("abcd"))
    )
    kept = top_k(within="task", k=2)(frame)
    assert kept["experience_id"].to_list() == ["g000/01", "g001/00"]


def algorithm_1(candidates: dict[str, float], n: int, beta: float, seed: int) -> list[str]:
    """Statistical rejection sampling as its paper tells it, with our uniform numbers."""
    chosen: list[str] = []
    round_ = 0
    while len(chosen) < n and set(candidates) - set(chosen):
        rest = {c: r for c, r in candidates.items() if c not in chosen}
        largest = max(rest.values())
        for c, r in rest.items():
            if len(chosen) < n and seeded_uniform(seed, round_, c) < math.e ** (
                (r - largest) / beta
            ):
                chosen.append(c)
        round_ += 1
    return chosen


@settings(max_examples=60)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), min_size=1, max_size=12),
    n=st.integers(1, 12),
    beta=st.sampled_from([0.01, 0.5, 5.0]),
    seed=st.integers(0, 99),
)
def test_rejection_sampling_is_algorithm_1(
    rewards: list[float], n: int, beta: float, seed: int
) -> None:
    frame = tries(*rewards)
    asked = sorted(frame["experience_id"], key=lambda name: seeded_uniform(seed, name))
    reward_of = dict(frame.select("experience_id", "reward").iter_rows())
    candidates = {name: reward_of[name] for name in asked}
    expected = algorithm_1(candidates, n, beta, seed)
    op = rejection_sample(n=n, beta=beta, seed=seed)
    assert op(frame)["experience_id"].to_list() == sorted(expected)
    assert len(expected) == min(n, len(rewards))
    mixed = frame.sample(fraction=1.0, shuffle=True, seed=seed)
    assert set(op(mixed)["experience_id"]) == set(expected)


def test_one_accepted_row_follows_the_tilted_policy() -> None:
    rewards, beta, many = (0.0, 1.0, 2.0), 1.0, 400
    frame = tries(*(rewards[(i + k) % 3] for i in range(many) for k in range(3)), size=3)
    first_round = Counter[float]()
    for name, reward in frame.select("experience_id", "reward").rows():
        first_round[reward] += seeded_uniform(0, 0, name) < math.exp((reward - 2.0) / beta)
    for reward in rewards:
        share = math.exp((reward - 2.0) / beta)
        deviation = math.sqrt(many * share * (1 - share))
        assert abs(first_round[reward] - many * share) <= 4 * deviation
    kept = rejection_sample(n=1, beta=beta)(frame)
    assert kept["group_id"].n_unique() == kept.height == many


def test_a_small_beta_keeps_the_best_and_a_large_one_any() -> None:
    frame = tries(0.0, 0.1, 0.2, 0.9, 1.0)
    assert named_ids(rejection_sample(n=2, beta=1e-3)(frame)) == ["03", "04"]
    kept = Counter(
        i for s in range(60) for i in named_ids(rejection_sample(n=1, beta=1e6, seed=s)(frame))
    )
    assert set(kept) == {"00", "01", "02", "03", "04"}


def named_ids(frame: pl.DataFrame) -> list[str]:
    return [name[-2:] for name in frame["experience_id"]]


def test_rejection_sampling_then_pairs_is_a_chain_and_equal_replies_are_one_candidate() -> None:
    frame = tries(1.0, 0.0, 1.0, None).with_columns(response_text=pl.Series(list("abac")))
    applied = rejection_sample(n=8).apply(frame)
    assert named_ids(applied.rows) == ["00", "01"]
    assert applied.dropped["reason"].to_list() == [
        "an equal reply of its group counts",
        "its reward is NULL",
    ]
    assert named(pairs()(applied.rows)) == [("00", "01", 1.0)]


def test_kto_labels_by_threshold_balance_their_classes() -> None:
    made = kto_labels(above=0.4, ratio=4 / 3)(tries(1.0, 0.5, 0.4, 0.0, None, 0.2))
    assert made["desirable"].to_list() == [True, True, False, False, None, False]
    good, bad = made.filter("desirable"), made.filter(~pl.col("desirable"))
    total = math.fsum(good["desirable_weight"]) / math.fsum(bad["desirable_weight"])
    assert total == pytest.approx(4 / 3, rel=1e-12)
    assert made["desirable_weight"].min() == 1.0
    assert made["desirable_weight"].to_list()[4] is None


def test_kto_labels_by_the_mean_leave_out_what_is_neither() -> None:
    frame = tries(1.0, 0.0, 0.5, None, 0.3, 0.3, 0.3, 0.3, size=4)
    made = kto_labels(by="group_mean")(frame)
    assert made["desirable"].to_list() == [True, False, None, None, None, None, None, None]
    equal = tries(0.1, 0.1, 0.1)  # the mean of these is a little more
    assert set(kto_labels(by="group_mean")(equal)["desirable"]) == {None}
    one_class = kto_labels()(tries(1.0, 1.0))
    assert one_class["desirable_weight"].to_list() == [1.0, 1.0]


@pytest.mark.parametrize("by", ["threshold", "group_mean"])
def test_kto_gives_no_label_for_a_reward_that_is_no_number(by: Any) -> None:
    frame = tries(1.0, 0.0, None)
    given = frame.with_columns(pl.col("reward").fill_null(float("nan")))
    labels = kto_labels(by=by)(given)["desirable"]
    assert labels.to_list() == [True, False, None]
    constant = frame.with_columns(reward=pl.lit(1.0))
    assert kto_labels(by=by)(constant).height == 3
