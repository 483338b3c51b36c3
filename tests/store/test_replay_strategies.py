"""Strategies: in which order, how likely, and with what weights rows are drawn."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from support.builders import experiences
from support.draws import chi_square, chi_square_limit, draws, flat, ids, names

from rlake.store import Store
from rlake.store.errors import QueryError
from rlake.store.replay import Fifo, Prioritized, Sampler, Uniform


def test_fifo_is_oldest_first(store: Store) -> None:
    made = [replace(e, batch=1 + i // 4) for i, e in enumerate(experiences(12))]
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


# priorities


def weighed(store: Store, priorities: Sequence[float | None]) -> None:
    """Append a row for each priority."""
    made = experiences(len(priorities))
    store.append(
        "experiences", [replace(e, priority=p) for e, p in zip(made, priorities, strict=True)]
    )


def shares(sampler: Sampler, n: int, steps: int) -> Counter[str]:
    """Count how often each row comes first in a step."""
    firsts = [sampler.draw(n, step=s, policy_version=0) for s in range(steps)]
    seen = Counter(int(d.row_ids[0]) for d in firsts if d)
    return Counter({name: seen[i] for i, name in enumerate(names(len(sampler)))})


def test_prioritized_draws_have_the_declared_chances(store: Store) -> None:
    priorities = np.linspace(0.5, 4.0, 20)
    weighed(store, priorities.tolist())
    expected = priorities**0.7 / (priorities**0.7).sum()
    rejected, steps, critical = 0, 400, 30.14353  # of chi-square with 19 degrees, at 5 %
    for seed in range(12):
        sampler = Sampler(store, strategy=Prioritized(alpha=0.7), max_draws=None, seed=seed)
        counts = shares(sampler, 3, steps)
        statistic = chi_square(np.array([counts[n] for n in names(20)]), steps * expected)
        rejected += statistic > critical
    assert rejected <= 4, "chance rejects more of 12 once in 5,000 times"


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.6, 0.4), (0.0, 1.0), (2.0, 0.0)])
def test_importance_weights_are_those_of_the_paper(
    store: Store, *, alpha: float, beta: float, replacement: bool
) -> None:
    priorities = np.array([0.0, 0.5, 1.0, 2.0, 3.5, 8.0, 1e-3, 1e6])
    weighed(store, priorities.tolist())
    strategy = Prioritized(alpha=alpha, beta=beta, replacement=replacement)
    sampler = Sampler(store, strategy=strategy, max_draws=None, seed=2)
    draw = sampler.draw(5, step=1, policy_version=0)
    assert draw is not None
    positive = priorities[priorities > 0]
    drawn = priorities[[names(8).index(i) for i in ids(sampler, draw)]]
    chances = drawn**alpha / (positive**alpha).sum()
    weights = (len(positive) * chances) ** -beta
    np.testing.assert_allclose(draw.weights, weights / weights.max(), rtol=1e-12)
    assert draw.weights.dtype == np.float64
    assert draw.weights.max() == 1.0


def test_a_priority_of_zero_is_never_drawn_and_is_counted(store: Store) -> None:
    weighed(store, [0.0, 1.0, 0.0, 2.0])
    for alpha in (0.0, 0.5, 1.0):
        sampler = Sampler(store, strategy=Prioritized(alpha=alpha), max_draws=None)
        assert sampler.draw(3, step=1, policy_version=0) is None
        assert str(sampler.supply(3, 0)) == (
            "need 3 rows, have 2 fresh, 0 stale, 0 drawn as often as allowed, 2 of priority 0"
        )
        assert set(flat(draws(sampler, 2, range(10)))) == {"g000/01", "g000/03"}


def test_a_priority_that_is_null_is_the_largest_of_those_that_may_be_drawn(store: Store) -> None:
    weighed(store, [1.0, None, 3.0, 100.0])
    sampler = Sampler(
        store, strategy=Prioritized(beta=1.0), where="rollout_index < 3", max_draws=None
    )  # fmt: skip
    draw = sampler.draw(3, step=1, policy_version=0)
    assert draw is not None
    weights = dict(zip(ids(sampler, draw), draw.weights.tolist(), strict=True))
    assert weights == pytest.approx({"g000/00": 1.0, "g000/01": 1 / 3, "g000/02": 1 / 3})


def test_the_priority_of_a_group_is_the_mean_over_its_rows_that_may_be_drawn(store: Store) -> None:
    weighed(store, [1.0, 3.0, None, 50.0, 6.0, 6.0, 6.0, 6.0])
    strategy = Prioritized(beta=1.0)
    sampler = Sampler(
        store, strategy=strategy, grouped=True, where="priority < 9 OR priority IS NULL"
    )
    draw = sampler.draw(2, step=1, policy_version=0)
    assert draw is not None
    weights = dict(zip(ids(sampler, draw), draw.weights.tolist(), strict=True))
    assert weights == pytest.approx({n: 1.0 if n < "g001" else 2 / 6 for n in names(8)})


def test_with_replacement_a_row_comes_again_but_never_above_the_cap(store: Store) -> None:
    weighed(store, [1.0, 1.0, 50.0])
    strategy = Prioritized(replacement=True)
    sampler = Sampler(store, strategy=strategy, max_draws=4)
    assert sampler.supply(13, 0).draws == 12
    assert sampler.draw(13, step=1, policy_version=0) is None
    first = sampler.draw(8, step=1, policy_version=0)
    assert first is not None
    seen = Counter(ids(sampler, first))
    assert max(seen.values()) == seen["g000/02"] == 4
    for name in seen:
        epochs = [e for i, e in zip(ids(sampler, first), first.epochs, strict=True) if i == name]
        assert epochs == list(range(1, seen[name] + 1))
    seen += Counter(flat(draws(sampler, 4, [2])))
    assert set(seen.values()) == {4}
    assert sampler.supply(1, 0).used_up == 3
    endless = Sampler(store, strategy=strategy, max_draws=None)
    assert len(draws(endless, 500, [1])[0]) == 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "`alpha` must be a finite number of 0 or more, got -1.0"),
        ({"alpha": float("nan")}, "`alpha` must be a finite number of 0 or more, got nan"),
        ({"beta": float("inf")}, "`beta` must be a finite number of 0 or more, got inf"),
    ],
)
def test_wrong_numbers_of_a_strategy_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        Prioritized(**options)  # type: ignore[arg-type]


def test_how_rows_are_chosen_is_told_in_full_and_the_same_way(store: Store) -> None:
    told = Sampler(store, strategy=Prioritized("reward", alpha=1, beta=0.5), seed=3).describe()
    assert told == (
        '{"alpha":1.0,"beta":0.5,"max_draws":1,"priority":"reward","replacement":false,'
        '"seed":3,"strategy":"prioritized","unit":"rows"}'
    )
    options = {"where": "reward > 0", "max_draws": None, "grouped": True}
    assert (
        Sampler(store, **options).describe()
        == Sampler(store, strategy=Fifo(), **options).describe()
    )
    polars = Sampler(store, strategy=Prioritized(pl.col("reward") + 1)).describe()
    assert 'col(\\"reward\\")' in polars
