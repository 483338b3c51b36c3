"""Draws: fresh, whole, each row as often as allowed, and the same wherever they are made again."""

import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from builders import experiences
from hypothesis import given, settings
from hypothesis import strategies as st

from rlake.store import Experience, Store, connect
from rlake.store.errors import QueryError
from rlake.store.sampling import Draw, Fifo, Freshness, Sampler, Uniform

EXAMPLES = settings(max_examples=10, deadline=None)
STRATEGIES = [Fifo(), Uniform()]


@contextmanager
def a_store(empty: Path) -> Iterator[Store]:
    """A store of its own for each example of a property."""
    with TemporaryDirectory() as folder:
        shutil.copytree(empty, Path(folder) / "store")
        yield connect(Path(folder) / "store")


def versioned(versions: Sequence[int | None], *, group_size: int = 1) -> list[Experience]:
    """Make a group for each policy version."""
    made = experiences(len(versions) * group_size, group_size=group_size)
    return [replace(e, policy_version=versions[i // group_size]) for i, e in enumerate(made)]


def ids(sampler: Sampler, draw: Draw | None) -> list[str]:
    assert draw is not None
    return sampler.read(draw, ["experience_id"])["experience_id"].to_list()


def draws(sampler: Sampler, n: int, steps: Iterable[int], *, version: int = 0) -> list[list[str]]:
    return [
        ids(sampler, sampler.draw(n, step=s, policy_version=version)) for s in steps
    ]  # fmt: skip


def names(n: int, *, group_size: int = 4) -> list[str]:
    return [str(e.experience_id) for e in experiences(n, group_size=group_size)]


def flat(steps: Iterable[list[str]]) -> list[str]:
    return [name for step in steps for name in step]


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


# strategies


def test_fifo_is_oldest_first(store: Store) -> None:
    made = [replace(e, step=1 + i // 4) for i, e in enumerate(experiences(12))]
    for part in (made[4:8], made[:4], made[8:]):
        store.append("experiences", part)
    sampler = Sampler(store)
    assert flat(draws(sampler, 3, range(1, 5))) == names(12)
    assert sampler.draw(1, step=5, policy_version=0) is None


def test_fifo_begins_a_new_epoch_when_all_were_drawn(store: Store) -> None:
    store.append("experiences", experiences(6))
    sampler = Sampler(store, max_draws=3)
    seen = [sampler.draw(4, step=s, policy_version=0) for s in range(1, 5)]
    order = flat(ids(sampler, d) for d in seen)
    assert order == (names(6) * 3)[:16]
    epochs = [e for d in seen if d for e in d.epochs.tolist()]
    assert epochs == [1] * 6 + [2] * 6 + [3] * 4
    assert sampler.supply(4, 0).fresh == 2


def test_new_rows_come_before_a_second_epoch(store: Store) -> None:
    store.append("experiences", experiences(4))
    sampler = Sampler(store, max_draws=2)
    draws(sampler, 4, [1])
    store.append("experiences", experiences(6))
    assert draws(sampler, 4, [2]) == [[*names(6)[4:], *names(2)]]


def test_uniform_draws_none_twice_in_a_step_and_each_as_often_as_allowed(store: Store) -> None:
    store.append("experiences", experiences(20))
    sampler = Sampler(store, strategy=Uniform(), max_draws=2)
    seen = draws(sampler, 5, range(1, 6))
    assert all(len(set(step)) == 5 for step in seen)
    rest = sampler.supply(1, 0).fresh
    seen += draws(sampler, rest, [6])
    assert max(Counter(flat(seen)).values()) == 2


def test_uniform_is_uniform(store: Store) -> None:
    rows, n, steps = 40, 8, 1500
    store.append("experiences", experiences(rows))
    sampler = Sampler(store, strategy=Uniform(), max_draws=None, seed=1)
    taken = [sampler.draw(n, step=s, policy_version=0) for s in range(steps)]
    counts = np.zeros(rows)
    firsts = np.zeros(rows)
    places = {
        int(r): i for i, r in enumerate(np.unique(np.concatenate([d.row_ids for d in taken if d])))
    }
    for draw in taken:
        assert draw is not None
        for row in draw.row_ids.tolist():
            counts[places[row]] += 1
        firsts[places[int(draw.row_ids[0])]] += 1
    # drawn without replacement, so the variance of a count is less by 1 - n / rows
    expected = steps * n / rows
    statistic = ((counts - expected) ** 2 / expected).sum() / (1 - n / rows) * (rows - 1) / rows
    assert statistic < chi_square_limit(rows - 1)
    expected = steps / rows
    assert ((firsts - expected) ** 2 / expected).sum() < chi_square_limit(rows - 1), "any place"


def chi_square_limit(freedom: int, z: float = 3.719) -> float:
    """The value that chance exceeds once in 10,000 times (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + z * sqrt(spread)) ** 3


# reproducible


@pytest.mark.parametrize("unit", ["rows", "groups"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_a_draw_is_the_same_however_the_rows_arrived(
    tmp_path: Path, empty_store: Path, strategy: Any, unit: str
) -> None:
    made = [
        replace(e, step=1 + i // 16, policy_version=i // 16) for i, e in enumerate(experiences(48))
    ]
    seen = []
    for trial in range(4):
        shutil.copytree(empty_store, tmp_path / str(trial))
        store = connect(tmp_path / str(trial))
        rng = random.Random(trial)
        groups = [made[i : i + 4] for i in range(0, 48, 4)]
        if trial:
            rng.shuffle(groups)
        sampler = Sampler(
            store, strategy=strategy, grouped=unit == "groups", seed=3, freshness=Freshness(2)
        )
        for i, group in enumerate(groups):
            rng.shuffle(group)
            store.append("experiences", group)
            if trial == 2:
                sampler.supply(1, 0)  # it may have looked while they came
            if trial == 3 and i == 6:
                store.maintain()
        seen.append(draws(sampler, 3, range(1, 4), version=2))
    assert all(s == seen[0] for s in seen)


def test_another_seed_or_step_is_another_draw(store: Store) -> None:
    store.append("experiences", experiences(100))

    def drawn(seed: int, step: int) -> tuple[str, ...]:
        sampler = Sampler(store, strategy=Uniform(), seed=seed)
        return tuple(draws(sampler, 10, [step])[0])

    pairs = [(seed, step) for seed in range(4) for step in range(4)]
    assert len({drawn(*pair) for pair in pairs}) == len(pairs)
    assert [drawn(*p) for p in pairs] == [drawn(*p) for p in pairs]


@pytest.mark.parametrize("unit", ["rows", "groups"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_restored_sampler_goes_on_as_if_nothing_had_happened(
    store: Store, strategy: Any, unit: str, kept: int
) -> None:
    store.append("experiences", experiences(40))

    def sampler() -> Sampler:
        return Sampler(store, strategy=strategy, grouped=unit == "groups", max_draws=2, seed=5)

    whole = draws(sampler(), 3, range(1, 7))
    resumed = sampler()
    resumed.restore(flat(whole[:kept]))
    again = [ids(resumed, resumed.redraw(step, step=kept + 1)) for step in whole[kept : kept + 1]]
    rest = draws(resumed, 3, range(kept + 2, 7))
    assert [*whole[:kept], *again, *rest] == whole


def test_a_redraw_is_in_the_recorded_order_and_counts(store: Store) -> None:
    store.append("experiences", experiences(8))
    sampler = Sampler(store)
    order = [names(8)[i] for i in (6, 0, 3)]
    assert ids(sampler, sampler.redraw(order, step=1)) == order
    assert draws(sampler, 5, [2]) == [[n for n in names(8) if n not in order]]


def test_epochs_are_restored(store: Store) -> None:
    store.append("experiences", experiences(2))
    sampler = Sampler(store, max_draws=5)
    sampler.restore([*names(2), *names(2), *names(1)])
    draw = sampler.draw(2, step=4, policy_version=0)
    assert draw is not None
    assert dict(zip(ids(sampler, draw), draw.epochs.tolist(), strict=True)) == {
        "g000/01": 3,
        "g000/00": 4,
    }


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


# payload and compaction


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


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_compaction_between_draws_repeats_and_loses_nothing(store: Store, strategy: Any) -> None:
    sampler = Sampler(store, strategy=strategy)
    seen: list[str] = []
    made = experiences(60)
    for step in range(1, 11):
        store.append("experiences", made[6 * step - 6 : 6 * step - 3])
        store.append("experiences", made[6 * step - 3 : 6 * step])
        draw = sampler.draw(4, step=step, policy_version=0)
        if step % 3 == 0:
            store.maintain()
        seen += ids(sampler, draw)  # read after its files were merged
    rest = sampler.supply(1, 0).fresh
    seen += draws(sampler, rest, [11])[0]
    assert rest == 20
    assert Counter(seen) == Counter(names(60))


def test_the_lag_of_what_is_drawn_never_grows_while_it_waits(store: Store) -> None:
    store.append("experiences", versioned([0, 1, 2, 3]))
    sampler = Sampler(store, freshness=Freshness(1), max_draws=None)
    counts = [sampler.supply(1, version).fresh for version in range(6)]
    assert counts == [4, 4, 3, 2, 1, 0]
    assert all(a >= b for a, b in pairwise(counts))
