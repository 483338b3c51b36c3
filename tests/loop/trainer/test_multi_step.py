"""Tries of several rows: what each step is credited with when it is drawn."""

from statistics import mean, stdev
from typing import Any

import polars as pl
import pytest
from support.tiny_models import config, table

from rlake.loop.run import run
from rlake.store import Store


def drawn(store: Store, algorithm: Any) -> pl.DataFrame:
    """Run two-step tries, and return what was drawn beside what it was made of."""
    settings = {"workflow": "support.runs:two_steps", "rewards": {}, "sampling": {"max_tokens": 4}}
    run(store, config(algorithm=algorithm, explorer=settings, trainer={"steps": 2}))
    rows = table(store, "experiences").drop("advantage")
    return table(store, "draws_current").join(rows, on="experience_id")


def test_all_steps_of_a_try_share_the_credit_of_its_outcome(store: Store) -> None:
    rows = drawn(store, {"multi_step_grpo": {"group_size": 5}})
    assert rows.height == 2 * 2 * 5 * 2
    for group in rows.partition_by("group_id"):
        last = group.sort("experience_id").group_by("rollout_index", maintain_order=True).last()
        outcomes = dict(zip(last["rollout_index"], last["reward"], strict=True))
        values = list(outcomes.values())
        for row in group.to_dicts():
            credit = (outcomes[row["rollout_index"]] - mean(values)) / (stdev(values) + 1e-6)
            assert row["advantage"] == pytest.approx(credit, abs=1e-9)
    assert rows["advantage"].n_unique() > 2


def test_a_step_is_compared_with_those_at_its_state_within_its_group_only(store: Store) -> None:
    rows = drawn(store, {"gigpo": {"group_size": 5, "gamma": 0.5, "omega": 2.0}})
    for group in rows.partition_by("group_id"):
        steps = group.sort("experience_id").to_dicts()
        outcomes = {step["rollout_index"]: step["reward"] for step in steps}  # the last one stays
        firsts = {step["rollout_index"]: step["experience_id"] for step in reversed(steps)}
        returns = {
            step["experience_id"]: outcomes[step["rollout_index"]]
            * (0.5 if firsts[step["rollout_index"]] == step["experience_id"] else 1.0)
            for step in steps
        }
        for step in steps:
            alike = [
                returns[one["experience_id"]]
                for one in steps
                if one["prompt_text"] == step["prompt_text"]
            ]
            of_try = outcomes[step["rollout_index"]] - mean(outcomes.values())
            own = returns[step["experience_id"]] - mean(alike)
            assert step["advantage"] == pytest.approx(of_try + 2 * own, abs=1e-9)
    assert rows["advantage"].n_unique() > 2
