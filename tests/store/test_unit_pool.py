"""The pool of a draw: its sums follow every change, and its draws follow the declared chances."""

from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import chi_square, chi_square_limit

from rlake.store.replay.growable_arrays import BLOCK, GrowableArray, Places, repeats
from rlake.store.replay.unit_pool import NO_VERSION, Pool, UnitPool

CRITICAL = {15: 24.99579, 19: 30.14353, 29: 42.55697}
"""Values of chi-square that chance exceeds in 5 of 100 cases, by degrees of freedom."""
SEEDS = 40
REJECTED = 9
"""Of 40 right samplers more than this many are rejected once in 25,000 times (binomial)."""


def growing(values: Any, dtype: type[np.generic], *, fill: float = 0) -> GrowableArray:
    made = GrowableArray(dtype, fill=fill)
    made.extend(np.asarray(values, dtype))
    return made


def units(masses: Any, **columns: Any) -> UnitPool:
    """Make units that may all be drawn, unless a column says otherwise."""
    n = len(masses)
    return UnitPool(
        growing(columns.get("drawable", np.ones(n)), np.bool_),
        growing(columns.get("versions", np.zeros(n)), np.int32, fill=NO_VERSION),
        growing(columns.get("times", np.zeros(n)), np.int32),
        growing(masses, np.float64),
    )


def pool(masses: Any, *, max_draws: int | None = None, **columns: Any) -> Pool:
    made = Pool(units(masses, **columns), max_draws=max_draws)
    made.look(oldest=None, horizon=None)
    return made


# sums


@settings(max_examples=60)
@given(data=st.data())
def test_sums_that_follow_equal_sums_made_anew(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    masses = GrowableArray(np.float64)
    made = UnitPool(
        GrowableArray(np.bool_),
        GrowableArray(np.int32, fill=NO_VERSION),
        GrowableArray(np.int32),
        masses,
    )
    max_draws = data.draw(st.none() | st.integers(1, 3), label="max_draws")
    following = Pool(made, max_draws=max_draws)
    for _ in range(data.draw(st.integers(1, 6), label="changes")):
        n = data.draw(st.integers(0, 3 * BLOCK), label="new")
        made.drawable.extend(rng.random(n) < 0.8)
        made.versions.extend(np.where(rng.random(n) < 0.1, NO_VERSION, rng.integers(0, 9, n)))
        made.times.extend(np.zeros(n, np.int32))
        masses.extend(np.where(rng.random(n) < 0.2, np.nan, rng.integers(0, 4, n)))
        size = len(made.drawable)
        some = rng.integers(0, size, min(size, 2)) if size else np.empty(0, np.int64)
        made.times.values[some] += 1
        masses.values[some] = rng.random(len(some))
        following.touch(some)
        oldest = data.draw(st.none() | st.integers(-1, 10), label="oldest")
        horizon = data.draw(st.none() | st.integers(0, size + 5), label="horizon")
        following.look(oldest=oldest, horizon=horizon)
        anew = Pool(made, max_draws=max_draws)
        anew.look(oldest=oldest, horizon=horizon)
        may = np.flatnonzero(made.drawable.values)
        may = may if horizon is None else may[:horizon]
        assert (following.drawable, anew.drawable) == (len(may), len(may))
        if max_draws is not None:
            may = may[made.times.values[may] < max_draws]
        assert (following.open, anew.open) == (len(may), len(may))
        may = may if oldest is None else may[made.versions.values[may] >= oldest]
        assert following.candidates().tolist() == anew.candidates().tolist() == may.tolist()
        heavy = may[~(masses.values[may] == 0)]
        assert (following.size, anew.size) == (len(heavy), len(heavy))
        left = None if max_draws is None else max_draws - made.times.values[heavy]
        room = left.sum() if left is not None else None if len(heavy) else 0
        assert following.room == anew.room == room
        np.testing.assert_array_equal(following.chances(heavy), anew.chances(heavy))
        np.testing.assert_allclose(following.chances(heavy).sum(), float(len(heavy) > 0))
        assert following.first(7).tolist() == first(made, may, 7)


def first(made: UnitPool, may: np.ndarray, n: int) -> list[int]:
    return sorted(may.tolist(), key=lambda place: (made.times.values[place], place))[:n]


# draws


@settings(max_examples=60)
@given(
    masses=st.lists(st.sampled_from([0.0, 1e-300, 0.5, 1.0, 7.0, 1e12, np.nan]), max_size=600),
    replacement=st.booleans(),
    max_draws=st.none() | st.integers(1, 3),
    seed=st.integers(0, 2**32),
    share=st.floats(0, 1),
)
def test_a_draw_takes_what_has_a_mass_as_often_as_it_may(
    masses: list[float], *, replacement: bool, max_draws: int | None, seed: int, share: float
) -> None:
    times = np.random.default_rng(seed).integers(0, 3, len(masses))
    made = pool(np.array(masses), max_draws=max_draws, times=times)
    most = made.room if replacement else made.size
    n = int((2 * len(masses) if most is None else most) * share)
    drawn = made.random(n, np.random.default_rng(seed), replacement=replacement)
    again = made.random(n, np.random.default_rng(seed), replacement=replacement)
    assert len(drawn) == n
    assert drawn.tolist() == again.tolist()
    for place, count in Counter(drawn.tolist()).items():
        assert masses[place] != 0
        assert count == 1 or replacement
        assert max_draws is None or times[place] + count <= max_draws


def follows(counts: np.ndarray, chance: np.ndarray) -> bool:
    """Tell whether draws of several seeds (a row each) fall into cells by these chances.

    Each seed is tested on its own, where as many are rejected as chance allows, and all together.
    """
    freedom = len(chance) - 1
    each = [chi_square(row, row.sum() * chance) for row in counts]
    rejected = sum(statistic > CRITICAL[freedom] for statistic in each)
    together = chi_square(counts.sum(axis=0), counts.sum() * chance)
    return rejected <= REJECTED and together < chi_square_limit(freedom)


def pairs_drawn(masses: np.ndarray, cells: int, cell: Any, *, times: int) -> np.ndarray:
    """Draw pairs without replacement, and count for each seed into which cells they fall."""
    made = pool(masses)
    counts = np.zeros((SEEDS, cells))
    for seed in range(SEEDS):
        rng = np.random.default_rng([seed, 11])
        for _ in range(times):
            counts[seed, cell(made.random(2, rng, replacement=False))] += 1
    return counts


def test_draws_with_replacement_have_the_declared_chances() -> None:
    masses = np.random.default_rng(3).random(20 * BLOCK)
    masses[::3] = 0.0
    made = pool(masses)
    cells = np.arange(len(masses)) * 20 // len(masses)
    chance = np.bincount(cells, masses) / masses.sum()
    seeds = [np.random.default_rng([seed, 7]) for seed in range(SEEDS)]
    drawn = [made.random(4000, rng, replacement=True) for rng in seeds]
    assert min(masses[d].min() for d in drawn) > 0
    assert follows(np.array([np.bincount(cells[d], minlength=20) for d in drawn]), chance)


def test_draws_of_much_of_a_pool_without_replacement_are_successive_sampling() -> None:
    masses = np.array([2.0, 2.5, 3.0, 4.0, 5.0, 3.5])
    pairs, total = list(permutations(range(6), 2)), masses.sum()
    place = {pair: i for i, pair in enumerate(pairs)}
    counts = pairs_drawn(masses, 30, lambda drawn: place[tuple(drawn.tolist())], times=800)
    chance = np.array([masses[i] / total * masses[j] / (total - masses[i]) for i, j in pairs])
    assert follows(counts, chance)
    independent = np.array([masses[i] * masses[j] for i, j in pairs])
    assert not follows(counts, independent / independent.sum()), "the test sees a difference"


def test_draws_of_little_of_a_pool_without_replacement_are_successive_sampling() -> None:
    classes = np.repeat(np.arange(4), 10)
    masses = np.array([4.0, 5.0, 6.0, 20.0])[classes]
    total, chance = masses.sum(), np.zeros((4, 4))
    for i, first_ in enumerate(masses):
        for j, second in enumerate(masses):
            if i != j:
                chance[classes[i], classes[j]] += first_ / total * second / (total - first_)
    counts = pairs_drawn(
        masses, 16, lambda drawn: classes[drawn[0]] * 4 + classes[drawn[1]], times=500
    )
    assert follows(counts, chance.ravel())
    assert not follows(counts, np.full(16, 1 / 16)), "the test sees a difference"


def test_what_is_not_known_weighs_as_the_heaviest_that_may_be_drawn() -> None:
    made = pool([1.0, np.nan, 4.0, 9.0, 0.0], drawable=[1, 1, 1, 0, 1])
    np.testing.assert_allclose(made.chances(np.arange(3)), [1 / 9, 4 / 9, 4 / 9])
    np.testing.assert_allclose(pool([np.nan, 0.0]).chances(np.arange(2)), [1.0, 0.0])


# arrays


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=20), max_size=12))
def test_places_are_found_in_an_array_that_grows(parts: list[list[int]]) -> None:
    hashes, places, known = GrowableArray(np.uint64), Places(), set()
    for part in parts:
        new = [h for h in dict.fromkeys(part) if h not in known]
        known |= set(new)
        hashes.extend(np.array(new, np.uint64))
        places.find(hashes.values, hashes.values[:1])
    wanted = np.array([*hashes.values.tolist(), 5, 2**63 + 1], np.uint64)
    listed = hashes.values.tolist()
    expected = [listed.index(h) if h in known else -1 for h in wanted.tolist()]
    assert places.find(hashes.values, wanted).tolist() == expected


@pytest.mark.parametrize(
    ("values", "nth"), [([], []), ([3], [0]), ([5, 7, 5, 5, 7], [0, 0, 1, 2, 1])]
)
def test_repeats_are_counted_in_order(values: list[int], nth: list[int]) -> None:
    assert repeats(np.array(values, np.int64)).tolist() == nth
