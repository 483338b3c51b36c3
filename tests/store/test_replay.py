"""Draws: fresh, whole, each row as often as allowed, from the rows that were asked for."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import experiences
from support.draws import STRATEGIES, a_store, draws, flat, names, versioned

from rlake.store import Store
from rlake.store.errors import QueryError
from rlake.store.replay import Freshness, Sampler, Uniform

EXAMPLES = settings(max_examples=10)


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
            if e.policy_version is not None and e.rollout_index
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
