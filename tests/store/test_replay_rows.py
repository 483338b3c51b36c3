"""Which rows are drawn: by a horizon, a query and a cap, and what can never be drawn."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import experiences, rows
from support.draws import STRATEGIES, a_store, draws, flat, ids, names
from support.preferences import preference

from rlake.store import Experience, Store
from rlake.store.errors import QueryError, StoreError
from rlake.store.replay import Fifo, Prioritized, Sampler, Uniform

EXAMPLES = settings(max_examples=10)


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
    where=st.sampled_from([None, "reward > 0", "rollout_index <> 1"]),
    query=st.sampled_from([None, "SELECT experience_id FROM experiences WHERE rollout_index < 3"]),
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
        if e.drop_reason or (query and e.rollout_index == 3):
            return False
        return where is None or (bool(e.reward) if "reward" in where else e.rollout_index != 1)

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
        ("DROP TABLE experiences", "cannot be read as a query"),
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
        ({"query": "SELECT experience_id FROM experiences WHERE rollout_index = 0"}, 3),
        ({"run_id": "another"}, 1),
        ({"max_draws": 5}, 9),
        ({"strategy": Uniform(replacement=True)}, 9),
        ({"strategy": Prioritized("rollout_index", replacement=True), "max_draws": 2}, 13),
        ({"strategy": Prioritized("rollout_index")}, 7),
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
    made = rows(experiences(1)).drop("experience_id", "group_id", "rollout_index", "response_text")
    place = pl.int_range(n, eager=True)
    store.append("experiences", pl.concat([made] * n).with_columns(
        experience_id=pl.format("e{}", place + 10**6),
        group_id=pl.format("g{}", place // 8 + 10**6),
        rollout_index=place % 8,
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
        for strategy in (Fifo(), Prioritized("1 + rollout_index")):
            sampler = Sampler(store, strategy=strategy, grouped=grouped)
            sampler.supply(1, 0)
            assert 20 < sampler.nbytes / n < 100


def test_rows_that_were_deleted_since_they_were_drawn_are_missed(store: Store) -> None:
    store.append("experiences", experiences(8))
    sampler = Sampler(store)
    draw = sampler.draw(8, step=1, policy_version=0)
    assert draw is not None
    store.dataset("experiences").delete("rollout_index = 3")
    with pytest.raises(StoreError, match="2 of 8 drawn rows are gone"):
        sampler.read(draw, ["reward"])


@pytest.mark.parametrize("n", [0, -1])
def test_a_step_of_no_rows_is_refused(store: Store, n: int) -> None:
    store.append("experiences", experiences(4))
    with pytest.raises(QueryError, match=f"a step must draw 1 or more rows, got {n}"):
        Sampler(store).draw(n, step=1, policy_version=0)


@pytest.mark.parametrize("unit", ["rows", "groups", "pairs"])
@EXAMPLES
@given(
    strategy=st.sampled_from([Fifo(), Uniform(), Prioritized("1.0"), Prioritized("1 + margin")]),
    num_groups=st.integers(1, 12),
    size=st.integers(1, 12),
    epochs=st.integers(1, 5),
)
def test_all_is_drawn_exactly_as_often_as_allowed_in_as_few_steps_as_that_takes(
    empty_store: Path, unit: str, strategy: Any, num_groups: int, size: int, epochs: int
) -> None:
    if unit != "pairs" and isinstance(strategy, Prioritized):
        strategy = Prioritized(strategy.priority.replace("margin", "rollout_index"))
    with a_store(empty_store) as store:
        store.append("experiences", experiences(4 * num_groups, group_size=4))
        made = names(4 * num_groups)
        pairs = [preference(b, a, margin=float(i % 3)) for i, (a, b) in enumerate(pairwise(made))]
        store.append("preferences", pairs)
        table = "preferences" if unit == "pairs" else "experiences"
        sampler = Sampler(
            store, strategy=strategy, max_draws=epochs, grouped=unit == "groups", table=table
        )
        num_units = sampler.supply(1, 0).fresh
        size = min(size, num_units)
        steps: list[list[str]] = []
        while left := sampler.supply(size, 0).draws:
            steps += draws(sampler, min(size, left), [len(steps) + 1])
    of_one = {"rows": 1, "groups": 4, "pairs": 2}[unit]
    assert len(steps) == -(-num_units * epochs // size)
    if unit == "pairs":  # a row may be of two pairs
        assert len(flat(steps)) == num_units * epochs * of_one
        return
    assert Counter(flat(steps)) == dict.fromkeys(made, epochs)
    assert all(len(set(step)) == len(step) for step in steps)
