"""What tries say of a policy, and of two: estimators, intervals and paired tests."""

import itertools
import math

import numpy as np
import pytest

from rlake.loop.evaluation.estimates import best_at_k, bootstrap, estimates, pass_at_k, wilson
from rlake.loop.evaluation.paired_test import mcnemar, paired, permutation
from rlake.store import Store
from rlake.store.errors import JobError


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_and_best_at_k_are_means_over_all_choices_of_k_tries(n: int) -> None:
    rng = np.random.default_rng(n)
    for k in range(1, n + 1):
        rewards = rng.choice([0.0, 0.25, 1.0], size=n).tolist()
        choices = list(itertools.combinations(rewards, k))
        best = sum(max(c) for c in choices) / len(choices)
        passed = sum(max(c) >= 1 for c in choices) / len(choices)
        assert best_at_k(rewards, k) == pytest.approx(best)
        assert pass_at_k(n, rewards.count(1.0), k) == pytest.approx(passed)


def test_pass_at_k_is_the_stores_macro(store: Store) -> None:
    for n, c, k in [(1, 0, 1), (8, 3, 4), (100, 7, 10), (5, 5, 5)]:
        [(said,)] = store.sql(f"SELECT pass_at_k({n}, {c}, {k})").fetchall()
        assert pass_at_k(n, c, k) == pytest.approx(said)


def test_a_task_without_enough_scored_tries_is_left_out_and_counted() -> None:
    found = {e.name: e for e in estimates([[1.0, 0.0], [1.0], []], ks=[1, 2])}
    assert (found["accuracy"].value, found["accuracy"].num_tasks) == (0.75, 2)
    assert (found["pass@2"].value, found["pass@2"].num_tasks) == (1.0, 1)
    assert math.isnan(estimates([[1.0]], ks=[2])[-1].value)


@pytest.mark.parametrize(("right", "tries"), [(0, 5), (3, 7), (50, 50), (812, 1319)])
def test_the_interval_of_a_share_is_that_of_scipy(right: int, tries: int) -> None:
    from scipy.stats import binomtest

    expected = binomtest(right, tries).proportion_ci(method="wilson")
    assert wilson(right, tries) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_tasks_that_were_tried_once_have_wilsons_interval_and_others_the_bootstraps() -> None:
    once = estimates([[1.0], [0.0], [1.0]], ks=[1])
    assert [e.interval for e in once] == ["wilson", "bootstrap", "wilson", "bootstrap"]
    assert (once[0].low, once[0].high) == wilson(2, 3)
    assert estimates([[1.0, 0.0], [0.0, 0.0]])[0].interval == "bootstrap"


def test_the_bootstraps_interval_holds_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for i in range(100):
        low, high = bootstrap(rng.normal(1.0, 2.0, size=60), seed=i)
        held += low <= 1.0 <= high
    assert 88 <= held <= 99
    assert bootstrap([0.0, 1.0, 1.0], seed=3) == bootstrap([0.0, 1.0, 1.0], seed=3)


@pytest.mark.parametrize("size", [2, 5, 9])
def test_the_permutation_test_is_that_of_scipy(size: int) -> None:
    from scipy.stats import permutation_test

    rng = np.random.default_rng(size)
    a, b = rng.integers(0, 4, size=(2, size)).astype(float)
    expected = permutation_test(
        (b, a), lambda x, y: (x - y).mean(), permutation_type="samples", n_resamples=1000
    )
    assert permutation(b - a) == pytest.approx(expected.pvalue if any(a != b) else 1.0)


def test_large_differences_that_cancel_out_do_not_hide_the_small_ones() -> None:
    # with the two large ones on one side a sum is larger; else as large as 0.6, or 2e6 off it
    assert permutation([1e6, -1e6, 0.1, 0.2, 0.3]) == 0.625


def test_many_differences_are_tested_by_random_swaps_near_the_exact_answer() -> None:
    from scipy.stats import binomtest

    signs = np.array([1.0] * 40 + [-1.0] * 20)  # swaps of ones are a fair coin's throws
    assert permutation(signs) == pytest.approx(binomtest(40, 60).pvalue, abs=0.005)
    assert permutation(signs, seed=1) == permutation(signs, seed=1)
    assert permutation(np.ones(200)) == pytest.approx(1 / 10_001)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (1, 5), (9, 9), (3, 20)])
def test_mcnemars_test_is_an_exact_binomial_one(only_a: int, only_b: int) -> None:
    from scipy.stats import binomtest

    n = only_a + only_b
    expected = binomtest(only_a, n).pvalue if n else 1.0
    assert mcnemar(only_a, only_b) == pytest.approx(expected)


def test_two_policies_are_compared_on_the_tasks_that_both_were_scored_on() -> None:
    a = {"t": [0.0], "u": [1.0], "v": [0.0], "w": [], "x": [1.0]}
    b = {"t": [1.0], "u": [1.0], "v": [1.0], "w": [1.0]}
    found = paired(a, b)
    assert (found.num_tasks, found.num_left_out) == (3, 2)
    assert found.difference == found.accuracy_difference == pytest.approx(2 / 3)
    assert (found.only_a, found.only_b, found.mcnemar_p, found.p_value) == (0, 2, 0.5, 0.5)
    assert paired(b, a).difference == pytest.approx(-found.difference)


def test_right_and_wrong_are_not_counted_by_task_when_there_are_several_tries() -> None:
    found = paired({"t": [0.0, 1.0]}, {"t": [1.0, 1.0]})
    assert (found.accuracy_difference, found.mcnemar_p, found.low) == (0.5, None, None)


def test_what_shares_no_task_is_not_compared() -> None:
    with pytest.raises(JobError, match="no scored task in common"):
        paired({"t": [1.0]}, {"u": [1.0]})
