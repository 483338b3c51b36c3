"""Mixtures: shares hold exactly, sources keep to themselves, and a mixture is used as a sampler."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import experiences
from support.draws import draws, flat, ids, names

from rlake.store import Store, connect
from rlake.store.errors import QueryError
from rlake.store.replay import (
    Fifo,
    Freshness,
    Mixture,
    Prioritized,
    Sampler,
    Source,
    Uniform,
    split,
)


def stored(store: Store, n: int = 48) -> None:
    """Append rows of which every second is of an expert."""
    made = experiences(n)
    store.append(
        "experiences",
        [replace(e, source="expert" if i % 2 else "explorer") for i, e in enumerate(made)],
    )


def half_and_half(store: Store, **options: Any) -> Mixture:
    own: dict[str, Any] = {"where": "source = 'explorer'"} | options
    expert = {"strategy": Uniform(), "where": "source = 'expert'", "max_draws": None}
    return Mixture(
        store, {"own": Source(share=0.5, **own), "expert": Source(share=0.5, **expert)}, seed=4
    )


# shares


@settings(max_examples=60)
@given(
    parts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    n=st.integers(1, 70),
    start=st.integers(0, 10**6),
)
def test_each_step_is_split_to_the_nearest_and_a_period_exactly(
    parts: Sequence[int], n: int, start: int, mixtures: Any
) -> None:
    mixture = mixtures([p / sum(parts) for p in parts])
    total = Counter[str]()
    for step in range(start, start + sum(parts)):
        split = mixture.split(n, step)
        assert sum(split.values()) == n
        for (name, count), part in zip(sorted(split.items()), parts, strict=True):
            assert abs(count - n * part / sum(parts)) < 1
            total[name] += count
    assert [total[name] for name in sorted(total)] == [n * p for p in parts]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make mixtures of given shares, without opening a store for each."""
    store = connect(tmp_path_factory.mktemp("mixed") / "store")
    made: dict[tuple[float, ...], Mixture] = {}

    def make(shares: Sequence[float]) -> Mixture:
        key = tuple(shares)
        if key not in made:
            made[key] = Mixture(store, {f"s{i}": Source(share=s) for i, s in enumerate(shares)})
        return made[key]

    return make


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"a": 0.5, "b": 0.4}, "must add up to 1, got 0.5 + 0.4 = 0.9"),
        ({"a": 1.2, "b": -0.2}, "the share of source `b` must be above 0, got -0.2"),
        ({"a": 1.0, "b": 0.0}, "the share of source `b` must be above 0, got 0.0"),
        ({"a": float("nan")}, "the share of source `a` must be above 0, got nan"),
        ({}, "needs one source or more"),
    ],
)
def test_shares_that_are_none_are_refused(
    store: Store, shares: dict[str, float], message: str
) -> None:
    with pytest.raises(QueryError) as wrong:
        Mixture(store, {name: Source(share=share) for name, share in shares.items()})
    assert message in str(wrong.value)


def test_shares_in_thirds_may_be_written_short(store: Store) -> None:
    mixture = Mixture(
        store,
        {n: Source(share=s) for n, s in zip("abc", (0.333333, 0.333333, 0.333334), strict=True)},
    )
    splits = [tuple(mixture.split(1, s).values()) for s in range(3)]
    assert sorted(splits) == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_a_source_is_never_more_than_one_behind_its_share() -> None:
    given = np.array([split({"a": 0.3, "b": 0.7}, 1, step)["a"] for step in range(1, 31)])
    assert np.abs(given.cumsum() - 0.3 * np.arange(1, 31)).max() < 1


# drawing


def test_half_of_each_step_is_of_the_expert(store: Store) -> None:
    stored(store)
    mixture = half_and_half(store)
    seen = [mixture.draw(6, step=s, policy_version=0) for s in range(1, 5)]
    for draw in seen:
        assert draw is not None
        assert Counter(draw.sources) == {"own": 3, "expert": 3}
        told = mixture.read(draw, ["source"])["source"].to_list()
        assert told == ["expert" if s == "expert" else "explorer" for s in draw.sources]
    own = [
        i for d in seen if d for i, s in zip(ids(mixture, d), d.sources, strict=True) if s == "own"
    ]
    assert own == names(48)[::2][:12], "each source keeps its own order"


def test_a_source_that_has_too_little_is_named(store: Store) -> None:
    stored(store, 8)
    mixture = half_and_half(store)
    assert mixture.draw(10, step=1, policy_version=0) is None
    supply = mixture.supply(10, 0)
    assert not supply.enough
    assert "`own`: need 5 rows, have 4 fresh" in str(supply)
    assert supply.fresh == 8
    assert mixture.draw(8, step=1, policy_version=0) is not None


def test_a_source_may_be_a_snapshot_another_run_or_a_query(store: Store) -> None:
    stored(store, 8)
    store.snapshot("before")
    made = [
        replace(e, experience_id=f"{e.experience_id}b", run_id="b") for e in experiences(8)
    ]  # fmt: skip
    store.append("experiences", made)
    query = "SELECT experience_id FROM experiences WHERE run_id = 'b' AND rollout_index = 3"
    mixture = Mixture(
        store,
        {
            "before": Source(share=0.25, at="before"),
            "run": Source(share=0.5, run_id="b"),
            "query": Source(share=0.25, query=query, strategy=Uniform(replacement=True)),
        },
    )
    draw = mixture.draw(8, step=1, policy_version=0)
    assert draw is not None
    by_source: dict[str, set[str]] = {}
    for name, source in zip(ids(mixture, draw), draw.sources, strict=True):
        by_source.setdefault(str(source), set()).add(name)
    assert by_source["before"] == set(names(2))
    assert by_source["run"] == {f"{n}b" for n in names(4)}
    assert by_source["query"] <= {"g000/03b", "g001/03b"}
    assert draw.drawn_from == {"experiences": 3}


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_restored_mixture_goes_on_as_if_nothing_had_happened(store: Store, kept: int) -> None:
    stored(store)
    own = {"where": None, "strategy": Prioritized("1 + rollout_index", beta=1.0), "max_draws": 2}

    def mixture() -> Mixture:
        return half_and_half(store, **own)

    one = mixture()
    seen = [one.draw(5, step=s, policy_version=0) for s in range(1, 7)]
    whole = [ids(one, d) for d in seen]
    resumed = mixture()
    earlier = [d for d in seen[:kept] if d]
    resumed.restore(flat(whole[:kept]), sources=[s for d in earlier for s in d.sources])
    again = seen[kept]
    assert again is not None
    redrawn = resumed.redraw(
        whole[kept], step=kept + 1, weights=again.weights.tolist(), sources=again.sources
    )
    assert ids(resumed, redrawn) == whole[kept]
    assert redrawn.sources == again.sources
    np.testing.assert_array_equal(redrawn.weights, again.weights)
    np.testing.assert_array_equal(redrawn.epochs, again.epochs)
    assert draws(resumed, 5, range(kept + 2, 7)) == whole[kept + 1 :]


def test_a_step_of_a_mixture_is_rebuilt_from_the_versions_that_it_was_drawn_from(
    store: Store,
) -> None:
    stored(store, 24)
    store.snapshot("before")

    def mixture(until: dict[str, int] | None = None) -> Mixture:
        sources = {
            "past": Source(share=0.5, at="before", strategy=Uniform()),
            "now": Source(share=0.5, strategy=Uniform(), max_draws=3),
        }
        return Mixture(store, sources, until=until)

    first = mixture()
    draw = first.draw(10, step=1, policy_version=0)
    assert draw is not None
    store.append("experiences", experiences(48)[24:])
    store.maintain()
    again = mixture(draw.drawn_from).draw(10, step=1, policy_version=0)
    assert again is not None
    assert ids(first, again) == ids(first, draw)
    assert (again.sources, again.drawn_from) == (draw.sources, draw.drawn_from)


def test_the_order_in_which_sources_are_named_does_not_matter(store: Store) -> None:
    stored(store)
    sources = {
        "z": Source(share=0.3, strategy=Uniform()),
        "a": Source(share=0.7, strategy=Uniform()),
    }
    there, back = Mixture(store, sources), Mixture(store, dict(reversed(sources.items())))
    assert there.describe() == back.describe()
    assert draws(there, 5, range(1, 4)) == draws(back, 5, range(1, 4))


def test_sources_of_the_same_rows_draw_on_their_own(store: Store) -> None:
    stored(store, 40)
    mixture = Mixture(store, {n: Source(share=0.5, strategy=Uniform()) for n in "ab"})
    draw = mixture.draw(20, step=1, policy_version=0)
    assert draw is not None
    drawn = ids(mixture, draw)
    assert drawn[:10] != drawn[10:]


def test_freshness_and_the_horizon_are_a_source_s_own(store: Store) -> None:
    made = [replace(e, policy_version=i // 4) for i, e in enumerate(experiences(16))]
    store.append("experiences", made)
    mixture = Mixture(
        store,
        {
            "fresh": Source(share=0.5, freshness=Freshness(1), is_paced=True),
            "old": Source(share=0.5, where="policy_version < 2"),
        },
    )
    supply = mixture.supply(2, 3, horizon=10)
    assert (supply.parts["fresh"].fresh, supply.parts["fresh"].stale) == (2, 8)
    assert (supply.parts["old"].fresh, supply.parts["old"].stale) == (8, 0)


def test_what_can_never_be_filled_is_said_at_once(store: Store) -> None:
    stored(store, 8)
    store.snapshot("then")
    sources = {
        "few": Source(share=0.5, at="then", where="rollout_index = 0"),
        "new": Source(share=0.5, run_id="later"),
    }
    mixture = Mixture(store, sources)
    mixture.check(4)
    with pytest.raises(QueryError, match="source `few`: such a step can never be drawn: need 3"):
        mixture.check(6)


def test_a_plain_sampler_and_a_mixture_of_one_are_used_alike(store: Store) -> None:
    stored(store)
    for made in (Sampler(store, strategy=Fifo()), Mixture(store, {"all": Source(share=1.0)})):
        assert made.supply(4, 0).enough
        assert draws(made, 4, [1]) == [names(4)]
        draw = made.redraw(names(8)[4:], step=2, sources=["all"] * 4)
        assert ids(made, draw) == names(8)[4:]
        assert set(draw.sources) in ({None}, {"all"})
        made.restore(names(9)[8:], sources=["all"])
        assert draws(made, 1, [3]) == [names(10)[9:]]
