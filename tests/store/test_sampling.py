"""Draws: fresh, whole, each row as often as allowed, from the rows that were asked for."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builders import experiences, rows
from drawing import a_store, draws, flat, ids, names, versioned
from hypothesis import given, settings
from hypothesis import strategies as st

from rlake.store import Experience, Store
from rlake.store.errors import QueryError
from rlake.store.sampling import Fifo, Freshness, Prioritized, Sampler, Uniform

EXAMPLES = settings(max_examples=10, deadline=None)
STRATEGIES = [
    Fifo(),
    Uniform(),
    Uniform(replacement=True),
    Prioritized("1 + rollout"),
    Prioritized("1.0 / (1 + age)"),
]


# freshness


@pytest.mark.parametrize("unit", ["rows", "groups"])
@EXAMPLES
@given(
    versions=st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=20),
    max_lag=st.none() | st.integers(0, 5),
    strategy=st.sampled_from(STRATEGIES),
    data=st.data(),
)
def test_no_row_beyond_max_lag_is_ever_drawn(
    empty_store: Path,
    unit: str,
    versions: list[int | None],
    max_lag: int | None,
    strategy: Any,
    data: st.DataObject,
) -> None:
    with a_store(empty_store) as store:
        made = versioned(versions, group_size=2)
        made = [  # the second row of a group is up to two versions younger
            replace(e, policy_version=e.policy_version + int(str(e.experience_id)[3]) % 3)
            if e.policy_version is not None and e.rollout
            else e
            for e in made
        ]
        store.append("experiences", made)
        sampler = Sampler(
            store,
            strategy=strategy,
            freshness=Freshness(max_lag),
            grouped=unit == "groups",
            max_draws=2,
        )
        for step in range(1, 6):
            policy = data.draw(st.integers(0, 14), label="policy_version")
            supply = sampler.supply(1, policy)
            draw = sampler.draw(max(1, supply.fresh // 2), step=step, policy_version=policy)
            assert (draw is None) == (supply.fresh == 0)
            if draw is None:
                continue
            drawn = sampler.read(draw, ["policy_version"])["policy_version"].drop_nulls()
            if max_lag is not None:
                assert all(policy - v <= max_lag for v in drawn)


@pytest.mark.parametrize(("max_lag", "fresh"), [(None, 5), (0, 2), (1, 3), (2, 4), (9, 5)])
def test_what_is_fresh_is_what_is_counted(store: Store, max_lag: int | None, fresh: int) -> None:
    store.append("experiences", versioned([0, 1, 2, 3, None]))
    sampler = Sampler(store, freshness=Freshness(max_lag))
    supply = sampler.supply(6, 3)
    assert (supply.fresh, supply.stale) == (fresh, 5 - fresh)
    assert str(supply) == (
        f"need 6 rows, have {fresh} fresh, {5 - fresh} stale, 0 drawn as often as allowed"
    )


def test_a_group_is_as_old_as_its_oldest_row(store: Store) -> None:
    [a, b] = versioned([0], group_size=2)
    store.append("experiences", [replace(a, policy_version=5), replace(b, policy_version=3)])
    sampler = Sampler(store, grouped=True, freshness=Freshness(1))
    assert sampler.supply(1, 5).stale == 1
    assert sampler.draw(1, step=1, policy_version=5) is None
    assert sampler.draw(1, step=1, policy_version=4) is not None


def test_stale_rows_stay_and_only_are_not_drawn(store: Store) -> None:
    store.append("experiences", versioned([0, 0, 5]))
    sampler = Sampler(store, freshness=Freshness(0))
    assert draws(sampler, 1, [6], version=5) == [["g002/00"]]
    assert sampler.draw(1, step=7, policy_version=5) is None
    assert store.count("experiences") == 3
    assert draws(sampler, 2, [8], version=0) == [["g000/00", "g001/00"]]


# supply


def test_too_few_rows_are_not_drawn_and_not_counted(store: Store) -> None:
    store.append("experiences", experiences(3))
    sampler = Sampler(store)
    assert sampler.draw(4, step=1, policy_version=0) is None
    assert sampler.supply(4, 0).fresh == 3
    store.append("experiences", experiences(4))
    assert draws(sampler, 4, [1]) == [names(4)]


def test_an_empty_store_can_be_drawn_from_in_vain(store: Store) -> None:
    sampler = Sampler(store, grouped=True)
    assert sampler.draw(1, step=1, policy_version=0) is None
    assert str(sampler.supply(2, 0)) == (
        "need 2 groups, have 0 fresh, 0 stale, 0 drawn as often as allowed"
    )


def test_max_draws_must_be_positive(store: Store) -> None:
    with pytest.raises(QueryError, match="`max_draws` must be 1 or more, got 0"):
        Sampler(store, max_draws=0)


# groups and conditions


def test_groups_stay_whole(store: Store) -> None:
    store.append("experiences", experiences(40))
    sampler = Sampler(store, strategy=Uniform(), grouped=True)
    for step in range(1, 6):
        draw = sampler.draw(2, step=step, policy_version=0)
        assert draw is not None
        groups = sampler.read(draw, ["group_id"])["group_id"].to_list()
        assert [groups.count(g) for g in dict.fromkeys(groups)] == [4, 4]
        assert len(draw.weights) == len(draw.epochs) == 8


def test_a_group_that_came_in_parts_is_drawn_whole(store: Store) -> None:
    made = experiences(8)
    sampler = Sampler(store, grouped=True)
    for part in (made[5:], made[1:3]):
        store.append("experiences", part)
        sampler.supply(1, 0)
    store.append("experiences", [made[0], *made[3:5]])
    assert draws(sampler, 1, [1, 2]) == [names(8)[:4], names(8)[4:]]


@pytest.mark.parametrize("unit", ["rows", "groups"])
def test_rows_that_come_late_do_not_make_drawn_ones_new(store: Store, unit: str) -> None:
    made = experiences(12)
    store.append("experiences", made[5:])
    sampler = Sampler(store, grouped=unit == "groups")
    first = draws(sampler, 1 if unit == "groups" else 3, [1])
    assert first == [names(8)[5:]]
    store.append("experiences", made[:5])
    rest = draws(sampler, *((1, [2, 3]) if unit == "groups" else (9, [2])))
    late = [] if unit == "groups" else names(5)[4:]  # its group was trained on without it
    assert flat(rest) == [*names(4), *late, *names(12)[8:]]
    assert sampler.draw(1, step=4, policy_version=0) is None


def test_where_and_dropped_rows_are_read_with_their_group_but_not_allowed(store: Store) -> None:
    made = experiences(12, reward=[1.0, 0.0, None, 1.0])
    made[3] = replace(made[3], drop_reason="bad")
    made[4:8] = [replace(e, drop_reason="bad") for e in made[4:8]]
    store.append("experiences", made)
    sampler = Sampler(store, grouped=True, where="reward > 0")
    assert sampler.supply(2, 0).fresh == 2, "a group of which nothing is left is none"
    draw = sampler.draw(2, step=1, policy_version=0)
    assert draw is not None
    rows = sampler.read(draw, ["experience_id", "reward"])
    assert rows["experience_id"].to_list() == [*names(4), *names(12)[8:]]
    assert rows["allowed"].to_list() == [True, False, False, False, True, False, False, True]
    assert rows["reward"].to_list() == [1.0, 0.0, None, 1.0] * 2


def test_single_rows_are_drawn_only_where_the_condition_is_true(store: Store) -> None:
    store.append("experiences", experiences(8, reward=[1.0, 0.0, None, 1.0]))
    sampler = Sampler(store, where="reward > 0")
    assert draws(sampler, 4, [1]) == [["g000/00", "g000/03", "g001/00", "g001/03"]]


def test_a_condition_may_ask_other_tables(store: Store) -> None:
    store.append("experiences", experiences(8))
    verdict = {"scorer": "judge", "scorer_version": "1"}
    where = "experience_id IN (SELECT experience_id FROM scores WHERE value > 0.5)"
    sampler = Sampler(store, where=where)
    assert sampler.supply(1, 0).fresh == 0
    values = {"g000/01": 1.0, "g001/02": 0.9, "g000/02": 0.1}
    store.append("scores", [verdict | {"experience_id": i, "value": v} for i, v in values.items()])
    assert draws(sampler, 1, [1, 2]) == [["g000/01"], ["g001/02"]]
    store.append("scores", [verdict | {"experience_id": "g000/00", "value": 1.0}])
    assert draws(sampler, 1, [3]) == [["g000/00"]], "what was drawn stays drawn"
    assert sampler.draw(1, step=4, policy_version=0) is None


def test_only_rows_of_the_run_are_drawn(store: Store) -> None:
    made = [replace(e, run_id="a" if i % 2 else "b") for i, e in enumerate(experiences(8))]
    store.append("experiences", made)
    for where in (None, "run_id = 'a'", "run_id <> 'b'"):
        assert draws(Sampler(store, run_id="a", where=where), 4, [1]) == [names(8)[1::2]]


def test_the_payload_is_read_in_the_order_of_the_draw(store: Store) -> None:
    made = [replace(e, token_ids=[i], reward=float(i)) for i, e in enumerate(experiences(32))]
    store.append_stream("experiences", [made[:10], made[10:]])
    sampler = Sampler(store, strategy=Uniform())
    draw = sampler.draw(20, step=1, policy_version=0)
    assert draw is not None
    rows = sampler.read(draw, ["reward", "token_ids", "experience_id"])
    place = {str(e.experience_id): i for i, e in enumerate(made)}
    drawn = [place[i] for i in rows["experience_id"]]
    assert rows["token_ids"].to_list() == [[i] for i in drawn]
    assert rows["reward"].to_list() == drawn
    assert drawn != sorted(drawn)


def test_the_lag_of_what_is_drawn_never_grows_while_it_waits(store: Store) -> None:
    store.append("experiences", versioned([0, 1, 2, 3]))
    sampler = Sampler(store, freshness=Freshness(1), max_draws=None)
    counts = [sampler.supply(1, version).fresh for version in range(6)]
    assert counts == [4, 4, 3, 2, 1, 0]
    assert all(a >= b for a, b in pairwise(counts))


# a horizon, a query, a cap, a check


def test_units_beyond_the_horizon_wait(store: Store) -> None:
    made = experiences(12)
    made[1] = replace(made[1], drop_reason="bad")
    store.append("experiences", made)
    sampler = Sampler(store, strategy=Uniform(), max_draws=2)
    assert sampler.supply(1, 0, horizon=4).fresh == 4
    seen = flat(draws(sampler, 4, [1, 2], horizon=4))
    assert sorted(seen) == sorted([names(5)[0], *names(5)[2:]] * 2), "what is dropped is no unit"
    assert sampler.draw(1, step=3, policy_version=0, horizon=4) is None
    assert flat(draws(sampler, 1, [3], horizon=5)) == names(6)[5:]
    assert sampler.supply(1, 0, horizon=99).fresh == sampler.supply(1, 0).fresh == 7
    assert sampler.supply(1, 0, horizon=0).fresh == 0


@pytest.mark.parametrize("unit", ["rows", "groups"])
@EXAMPLES
@given(
    strategy=st.sampled_from(STRATEGIES),
    max_draws=st.sampled_from([1, 2, 3, None]),
    where=st.sampled_from([None, "reward > 0", "rollout <> 1"]),
    query=st.sampled_from([None, "SELECT experience_id FROM experiences WHERE rollout < 3"]),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_draws_keep_to_all_that_was_asked(
    empty_store: Path,
    unit: str,
    strategy: Any,
    max_draws: int | None,
    where: str | None,
    query: str | None,
    sizes: list[int],
) -> None:
    made = experiences(24, reward=[1.0, 0.0, None, 1.0])
    made[7] = replace(made[7], drop_reason="bad")
    grouped = unit == "groups"

    def may(e: Experience) -> bool:
        if e.drop_reason or (query and e.rollout == 3):
            return False
        return where is None or (bool(e.reward) if "reward" in where else e.rollout != 1)

    with a_store(empty_store) as store:
        store.append("experiences", made)
        sampler = Sampler(
            store, strategy=strategy, grouped=grouped, where=where, query=query, max_draws=max_draws
        )
        times: Counter[str] = Counter()
        for step, n in enumerate(sizes, 1):
            supply = sampler.supply(n, 0)
            draw = sampler.draw(n, step=step, policy_version=0)
            assert (draw is not None) == supply.enough
            if draw is None:
                continue
            rows = sampler.read(draw, ["experience_id", "group_id"])
            allowed = {str(e.experience_id): may(e) for e in made}
            assert rows["allowed"].to_list() == [allowed[i] for i in rows["experience_id"]]
            column, size = ("group_id", 4) if grouped else ("experience_id", 1)
            called = rows[column].to_list()[::size]
            assert len(called) == n
            if grouped:
                whole = [str(e.experience_id) for g in called for e in made if e.group_id == g]
                assert rows["experience_id"].to_list() == whole
            else:
                assert rows["allowed"].all()
            assert strategy.replacement or len(set(called)) == n
            times.update(called)
            assert draw.epochs[::size].max() <= max(times.values())
        assert max_draws is None or max(times.values(), default=0) <= max_draws


def test_a_query_follows_what_it_reads(store: Store) -> None:
    store.append("experiences", experiences(8))
    query = "SELECT experience_id, value FROM scores WHERE value > 0.5 -- what a judge likes"
    sampler = Sampler(store, query=query)
    assert sampler.supply(1, 0).fresh == 0
    verdict = {"scorer": "judge", "scorer_version": "1"}
    values = {"g000/01": 1.0, "g001/02": 0.9, "g000/02": 0.1}
    store.append("scores", [verdict | {"experience_id": i, "value": v} for i, v in values.items()])
    draw = sampler.draw(2, step=1, policy_version=0)
    assert ids(sampler, draw) == ["g000/01", "g001/02"]
    assert draw is not None
    assert draw.drawn_from == {"experiences": 2, "scores": 2}
    store.append("scores", [verdict | {"experience_id": "g000/00", "value": 1.0}])
    assert draws(sampler, 1, [2]) == [["g000/00"]]


def test_a_query_may_ask_a_view(store: Store) -> None:
    store.append("experiences", experiences(8, reward=[1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    hard = "SELECT experience_id FROM experiences JOIN groups USING (group_id) WHERE pass_rate = 0;"
    sampler = Sampler(store, query=hard)
    assert draws(sampler, 4, [1]) == [names(8)[4:]]
    store.append("experiences", [replace(e, group_id="g9", experience_id=f"z{i}", reward=0.0)
                                 for i, e in enumerate(experiences(2))])  # fmt: skip
    assert draws(sampler, 2, [2]) == [["z0", "z1"]]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT reward, task_id FROM experiences", "must give the column `experience_id` of the "
         "rows to draw, got `reward`, `task_id`"),
        ("SELECT 'x' || range AS experience_id FROM range(3)", "gives 3 ids of experiences that "
         "are not in the store, such as `x0`"),
        ("SELECT experience_id FROM", "does not parse"),
        ("DROP TABLE experiences", "is no query that can be read"),
        ("SELECT experience_id FROM taskz", "no table or view `taskz`; did you mean `tasks`"),
        ("SELECT experience_id FROM experiences WHERE random() < 0.5", "calls `random`"),
        ("SELECT 1; SELECT 2", "must be one expression, got 2 statements"),
    ],
)  # fmt: skip
def test_a_wrong_query_is_refused(store: Store, query: str, message: str) -> None:
    store.append("experiences", experiences(4))
    with pytest.raises(QueryError) as wrong:
        Sampler(store, query=query).supply(1, 0)
    assert message in str(wrong.value)


def test_a_condition_whose_value_changes_by_itself_is_refused(store: Store) -> None:
    with pytest.raises(QueryError, match=r"`where` .* calls `now`, which gives another value"):
        Sampler(store, where="created_at > now() - INTERVAL 1 DAY")


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({}, 9),
        ({"grouped": True}, 3),
        ({"where": "reward > 9"}, 1),
        ({"query": "SELECT experience_id FROM experiences WHERE rollout = 0"}, 3),
        ({"run_id": "another"}, 1),
        ({"max_draws": 5}, 9),
        ({"strategy": Uniform(replacement=True)}, 9),
        ({"strategy": Prioritized("rollout", replacement=True), "max_draws": 2}, 13),
        ({"strategy": Prioritized("rollout")}, 7),
    ],
)
def test_a_draw_that_can_never_be_filled_is_said_at_once(
    store: Store, options: dict[str, Any], n: int
) -> None:
    store.append("experiences", experiences(8, reward=1.0))
    store.snapshot("then")
    past = Sampler(store.at("then"), **options)
    with pytest.raises(QueryError, match=f"such a step can never be drawn: need {n} "):
        past.check(n)
    assert n == 1 or past.check(n - 1) is None
    Sampler(store, **options).check(n)  # to a store that is written to, rows may still come
    with pytest.raises(QueryError, match="a step must draw 1 or more"):
        past.check(0)


def test_a_table_that_was_restored_is_read_anew(store: Store) -> None:
    store.append("experiences", experiences(4))
    version = store.dataset("experiences").version
    store.append("experiences", experiences(8))
    sampler = Sampler(store, max_draws=2)
    assert draws(sampler, 6, [1]) == [names(6)]
    store.open_at("experiences", version).restore()
    assert sampler.supply(1, 0).fresh == 4
    store.append("experiences", [*experiences(5)[4:], *experiences(10)[9:]])
    assert draws(sampler, 1, [2]) == [["g002/01"]]
    assert sorted(flat(draws(sampler, 5, [3]))) == names(5), "what was drawn once stays so"
    assert draws(sampler, 1, [4]) == [["g002/01"]]


def many(store: Store, n: int) -> None:
    """Append n rows, all alike but for their place."""
    made = rows(experiences(1)).drop("experience_id", "group_id", "rollout", "response_text")
    place = pl.int_range(n, eager=True)
    store.append("experiences", pl.concat([made] * n).with_columns(
        experience_id=pl.format("e{}", place + 10**6),
        group_id=pl.format("g{}", place // 8 + 10**6),
        rollout=place % 8,
        response_text=pl.format("{}", place),
    ))  # fmt: skip


def test_texts_are_judged_some_rows_at_a_time(store: Store) -> None:
    many(store, 9000)
    sampler = Sampler(
        store,
        strategy=Prioritized("response_text::INT", beta=1.0),
        where="response_text::INT % 1000 = 999",
    )
    draw = sampler.draw(9, step=1, policy_version=0)
    assert draw is not None
    told = sampler.read(draw, ["response_text"])["response_text"].cast(pl.Int64)
    assert sorted(told) == list(range(999, 9000, 1000))
    assert draw.weights.tolist() == pytest.approx((999 / told).to_list())
    assert sampler.draw(1, step=2, policy_version=0) is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_rows_are_drawn_as_often_as_allowed(store: Store, strategy: Any) -> None:
    many(store, 600)
    sampler = Sampler(store, strategy=strategy, max_draws=2)
    seen: Counter[int] = Counter()
    step = 0
    while left := sampler.supply(200, 0).draws:
        step += 1
        draw = sampler.draw(min(200, left), step=step, policy_version=0)
        assert draw is not None
        seen.update(draw.row_ids.tolist())
    assert len(seen) == 600
    assert set(seen.values()) == {2}
    assert sampler.supply(1, 0).used_up == 600


def test_the_index_takes_less_than_100_bytes_a_row(store: Store) -> None:
    n = 20_000
    many(store, n)
    for grouped in (False, True):
        for strategy in (Fifo(), Prioritized("1 + rollout")):
            sampler = Sampler(store, strategy=strategy, grouped=grouped)
            sampler.supply(1, 0)
            assert 20 < sampler.nbytes / n < 100
