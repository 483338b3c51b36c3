"""The same rows wherever they are drawn: other machines, resumed runs, compaction, later proofs."""

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from support.builders import experiences
from support.draws import a_store, draws, flat, ids, names

from rlake.store import Store, connect
from rlake.store.replay import Fifo, Freshness, Prioritized, Sampler, Uniform

EXAMPLES = settings(max_examples=12)
STRATEGIES = [
    Fifo(),
    Uniform(),
    Uniform(replacement=True),
    Prioritized("1 + rollout_index", beta=0.5),
    Prioritized("(1 + rollout_index) / (1.0 + age + times_drawn)"),
]


# reproducible


@pytest.mark.parametrize("unit", ["rows", "groups"])
@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[-1]], ids=lambda s: s.name)
def test_a_draw_is_the_same_however_the_rows_arrived(
    tmp_path: Path, empty_store: Path, strategy: Any, unit: str
) -> None:
    made = [
        replace(e, batch=1 + i // 16, policy_version=i // 16) for i, e in enumerate(experiences(48))
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
@pytest.mark.parametrize("kept", [0, 2])
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


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[-1]], ids=lambda s: s.name)
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


@EXAMPLES
@given(
    order=st.permutations(range(24)),
    cuts=st.sets(st.integers(1, 23), max_size=4),
    strategy=st.sampled_from(STRATEGIES),
    max_draws=st.sampled_from([1, 2, None]),
    grouped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_draws_are_a_function_of_rows_and_earlier_draws(
    empty_store: Path,
    *,
    order: list[int],
    cuts: set[int],
    strategy: Any,
    max_draws: int | None,
    grouped: bool,
    seed: int,
) -> None:
    made = [
        replace(e, policy_version=i // 8, batch=1 + i // 8) for i, e in enumerate(experiences(24))
    ]
    options: dict[str, Any] = {
        "strategy": strategy,
        "max_draws": max_draws,
        "grouped": grouped,
        "seed": seed,
        "freshness": Freshness(2),
    }
    n = 2 if grouped else 5
    with a_store(empty_store) as there, a_store(empty_store) as here:
        there.append("experiences", made)
        whole = draws(Sampler(there, **options), n, [1, 2], version=2)
        edges = [0, *sorted(cuts), 24]
        following = Sampler(here, **options)
        for start, end in pairwise(edges):
            here.append("experiences", [made[i] for i in order[start:end]])
            following.supply(n, 1)
        assert draws(following, n, [1], version=2) == whole[:1]
        resumed = Sampler(here, **options)
        resumed.restore(whole[0])
        assert draws(resumed, n, [2], version=2) == draws(following, n, [2], version=2) == whole[1:]


def test_a_step_is_rebuilt_from_the_versions_that_it_was_drawn_from(store: Store) -> None:
    options: dict[str, Any] = {
        "strategy": Prioritized("p / (1.0 + age)", beta=1.0),
        "with_columns": ["p=derived:priority"],
        "where": "experience_id NOT IN (SELECT experience_id FROM scores WHERE value < 0)",
        "max_draws": 2,
    }
    sampler = Sampler(store, **options)
    made = experiences(40)
    taken = []
    for step in range(1, 6):
        some = made[8 * step - 8 : 8 * step]
        store.append("experiences", [replace(e, policy_version=step - 1) for e in some])
        values = [
            {"experience_id": e.experience_id, "name": "priority", "version": str(step),
             "value": float(step + e.rollout_index)}
            for e in some[::2]
        ]  # fmt: skip
        store.append("experience_values", values)
        verdict = {"scorer": "s", "scorer_version": "1", "value": -1.0}
        store.append("scores", [verdict | {"experience_id": some[0].experience_id}])
        taken.append(sampler.draw(4, step=step, policy_version=step))
    whole = [ids(sampler, draw) for draw in taken]
    store.maintain()
    for name in ("experiences", "experience_values", "scores", "job_events"):
        store.open_at(name).cleanup_old_versions(older_than=timedelta(0))
    for i, draw in enumerate(taken):
        assert draw is not None
        then = Sampler(store, **options, until=draw.drawn_from)
        then.restore(flat(whole[:i]))
        again = then.draw(4, step=i + 1, policy_version=i + 1)
        assert again is not None
        assert ids(then, again) == whole[i]
        assert again.weights.tolist() == draw.weights.tolist()
        assert again.drawn_from == draw.drawn_from


def test_what_is_drawn_again_is_what_is_stored_in_every_column(store: Store) -> None:
    made = [
        replace(
            e,
            run_id="r",
            batch=1,
            policy_version=i,
            segments=[{"policy_version": i, "num_tokens": 2}],
            token_ids=[i, 2, 3],
            loss_mask=[False, True, True],
            logprobs=[0.0, -0.5, -float(i)],
            token_rewards=[0.0, 0.0, 1.0],
            teacher_logprobs=[0.0, -1.0, -2.0],
            prompt_length=1,
            reward=float(i),
            rewards={"a": float(i), "b": None},
            metrics={"seconds": 0.5},
            advantage=-1.0,
            priority=1.0 + i,
            messages=[{"role": "user", "content": "héllo"}],
            tools=[{"name": "calc"}],
            metadata={"k": [1, None]},
            finish_reason="stop",
            num_turns=1,
        )
        for i, e in enumerate(experiences(12))
    ]
    store.append_stream("experiences", [made[:5], made[5:]])
    columns = store.dataset("experiences").schema.names
    stored = store.scan("experiences").collect().select(columns)
    sampler = Sampler(store, strategy=Prioritized(replacement=True), max_draws=None)
    for step in (1, 2):
        draw = sampler.draw(30, step=step, policy_version=20)
        assert draw is not None
        read = sampler.read(draw, columns).drop("allowed")
        wanted = read.select("experience_id").join(
            stored, on="experience_id", how="left", maintain_order="left"
        )
        assert_frame_equal(read, wanted.select(read.columns))
        store.maintain()


def test_a_group_that_was_drawn_twice_in_a_step_is_drawn_twice_again(store: Store) -> None:
    store.append("experiences", experiences(12, reward=[1.0, 0.0, 1.0, 1.0]))
    options: dict[str, Any] = {
        "strategy": Uniform(replacement=True),
        "grouped": True,
        "where": "reward > 0",
        "max_draws": None,
    }
    sampler = Sampler(store, **options)
    draw = sampler.draw(8, step=1, policy_version=0)
    assert draw is not None
    rows = sampler.read(draw, ["experience_id"])
    resumed = Sampler(store, **options)
    recorded = rows.filter("allowed")["experience_id"].to_list()
    again = resumed.redraw(recorded, step=1)
    assert ids(resumed, again) == rows["experience_id"].to_list()
    assert again.epochs.tolist() == draw.epochs.tolist()
    restored = Sampler(store, **options)
    restored.restore(recorded)
    assert draws(restored, 3, [2]) == draws(sampler, 3, [2]) == draws(resumed, 3, [2])


def test_a_step_that_is_drawn_again_has_the_side_columns_of_then(store: Store) -> None:
    store.append("experiences", experiences(4))
    columns = ["reward=score:strict"]

    def judge(version: str, values: Sequence[float]) -> None:
        scores = [
            {"experience_id": i, "scorer": "strict", "scorer_version": version, "value": value}
            for i, value in zip(names(4), values, strict=True)
        ]
        store.append("scores", scores)

    judge("1", [0.0, 1.0, 2.0, 3.0])
    draw = Sampler(store, with_columns=columns).draw(4, step=1, policy_version=0)
    assert draw is not None
    judge("2", [9.0] * 4)
    again = Sampler(store, with_columns=columns)
    for drawn_from, values in ((draw.drawn_from, [0.0, 1.0, 2.0, 3.0]), (None, [9.0] * 4)):
        redrawn = again.redraw(names(4), step=1, drawn_from=drawn_from)
        rows = again.with_sides(redrawn, again.read(redrawn, ["experience_id", "reward"]))
        assert rows["reward"].to_list() == values
