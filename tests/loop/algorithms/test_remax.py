"""ReMax: one try more at each task, greedily, that others are compared with and none trains on."""

import polars as pl
import pytest
from support.tiny_models import config, table

from rlake.loop.run import run
from rlake.store import Store


def test_the_greedy_try_is_stored_compared_with_and_never_trained_on(store: Store) -> None:
    run(store, config(algorithm={"remax": {"group_size": 3}}, trainer={"steps": 2}))
    rows = table(store, "experiences").sort("experience_id")
    greedy = rows.filter(pl.col("drop_reason").is_not_null())
    assert rows.height == 2 * 2 * 4
    assert greedy["rollout_index"].to_list() == [3] * 4
    assert greedy["metrics"].list.len().to_list() == [1] * 4
    assert set(greedy["drop_reason"]) == {"greedy: others of its group are compared with it"}
    drawn = table(store, "draws_current")
    assert not set(drawn["experience_id"]) & set(greedy["experience_id"])
    baseline = dict(zip(greedy["group_id"], greedy["reward"], strict=True))
    for row in drawn.join(rows, on="experience_id").to_dicts():
        expected = row["reward"] - baseline[row["group_id"]]
        assert row["advantage"] == pytest.approx(expected, abs=1e-12)


def test_a_greedy_try_begins_with_the_likeliest_token(store: Store) -> None:
    run(store, config(algorithm={"remax": {"group_size": 4}}, trainer={"steps": 1}))
    rows = table(store, "experiences").with_columns(
        first=pl.col("logprobs").list.get(pl.col("prompt_length"))
    )
    for group in rows.partition_by("group_id"):
        greedy = group.filter(pl.col("drop_reason").is_not_null())["first"][0]
        assert greedy >= group["first"].max() - 1e-6  # type: ignore[operator]
        assert group["first"].n_unique() > 1
