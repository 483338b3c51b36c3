"""Priorities that a pipeline worked out decide what a trainer draws."""

import polars as pl
from support.tiny_models import offline, table, written

import rlake
from rlake.loop.run import run
from rlake.pipelines import Pipeline, Table
from rlake.store import Store


def prioritized(store: Store, *operators: object, with_columns: tuple[str, ...] = ()) -> None:
    source = Table("experiences", with_columns=with_columns)
    Pipeline("prioritize", source, list(operators), Table("experience_values")).run(store)  # pyright: ignore[reportArgumentType]


def drawn(store: Store, steps: int) -> pl.DataFrame:
    trainer = {
        "steps": steps,
        "batch_size": 2,
        "side_columns": ["priority=derived:priority"],
        "sampler": {"prioritized": {"beta": 1.0}},
    }
    run(store, offline(trainer=trainer))
    return table(store, "draws ORDER BY step, position")


def test_a_trainer_draws_by_the_priorities_of_a_pipeline(store: Store) -> None:
    rows = [
        rlake.Experience(**{**vars(r), "experience_id": f"{i:02d}", "policy_version": i % 2})
        for i, r in enumerate(written(8, response=[1, 2, 3, 4, 5, 6, 7, 8], group_size=8))
    ]
    store.append("experiences", rows)
    prioritized(store, {"surprise": {}})
    prioritized(
        store,
        {"freshness": {"half_life": 0.125, "into": "fresh"}},
        # of the older rows nothing is left; of the others, those that surprised most
        {
            "priority": {
                "expression": "CASE WHEN surprise > 1.2 THEN floor(fresh) * surprise ELSE 0 END"
            }
        },
        with_columns=("derived:surprise",),
    )
    stored = table(
        store, "experience_values WHERE name = 'priority' ORDER BY experience_id", "value"
    )["value"]
    assert [v > 0 for v in stored] == [False] * 5 + [True, False, True]
    assert stored.to_list()[7] > stored.to_list()[5] > 0
    found = drawn(store, steps=1)
    assert set(found["experience_id"]) == {"05", "07"}
    assert found["weight"].max() == 1.0
    assert found["weight"].n_unique() == 2, "the likelier weighs less"
