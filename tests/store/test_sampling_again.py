"""The same rows wherever they are drawn: other machines, resumed runs, compaction, later proofs."""

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import experiences
from drawing import draws, flat, ids, names

from rlake.store import Store, connect
from rlake.store.sampling import Fifo, Freshness, Prioritized, Sampler, Uniform

STRATEGIES = [
    Fifo(),
    Uniform(),
    Uniform(replacement=True),
    Prioritized("1 + rollout", beta=0.5),
    Prioritized("(1 + rollout) / (1.0 + age + times_drawn)"),
]


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
