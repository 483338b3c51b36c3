"""What single operators do to rows: cleaning, flat groups, priorities, copies and pairs."""

import random

import polars as pl
import pytest
from support.builders import experiences, rows

from rlake.operators import (
    clean_whitespace,
    copy_best,
    drop_flat_groups,
    group_statistics,
    priority,
)
from rlake.store.errors import OperatorError


def test_clean_whitespace_is_idempotent_and_keeps_paragraphs_and_null() -> None:
    frame = pl.DataFrame(
        {"experience_id": ["a", "b", "c"], "response_text": [" x \t y\r\n\n\n\n z ", None, "\n"]}
    )
    once = clean_whitespace()(frame)
    assert once["response_text"].to_list() == ["x y\n\nz", None, ""]
    assert clean_whitespace()(once).equals(once)


def test_flat_groups_go_whole_with_the_reason_and_null_rewards_stay_with_their_group() -> None:
    frame = rows(
        [
            *experiences(2, reward=(1.0, 1.0), group_id="flat"),
            *experiences(3, reward=(1.0, None, 0.0), group_id="mixed", task_id="m"),
            *experiences(2, reward=(None, 1.0), group_id="few", task_id="f"),
        ]
    ).with_columns(experience_id=pl.format("{}/{}", "group_id", "rollout_index"))
    kept, dropped = drop_flat_groups().split(frame)
    assert kept["group_id"].to_list() == ["mixed"] * 3
    assert dict(dropped.select("group_id", "reason").iter_rows()) == {
        "flat": "rewards of its group do not differ (std is not above 0)",
        "few": "its group has fewer than two rewards",
    }


def test_rounding_does_not_make_a_flat_group_differ() -> None:
    rng = random.Random(0)
    rewards = {
        f"{size}/{i}": [rng.uniform(-3, 3)] * size for size in range(2, 40) for i in range(9)
    }
    frame = pl.DataFrame({"group_id": rewards.keys(), "reward": rewards.values()})
    frame = frame.explode("reward").with_row_index("row")
    frame = frame.with_columns(experience_id=pl.col("row").cast(pl.String))
    assert drop_flat_groups()(frame).height == 0
    assert set(group_statistics()(frame)["group_std"]) == {0.0}


def test_a_reward_that_is_no_number_makes_no_group_differ() -> None:
    frame = rows(experiences(4, reward=(0.1, 0.1, 0.5, 0.5), group_size=2))
    for odd in (float("nan"), float("inf")):
        given = frame.with_columns(reward=pl.when(rollout_index=1).then(odd).otherwise("reward"))
        assert drop_flat_groups()(given).height == 0
        assert copy_best()(given)["parent_id"].drop_nulls().to_list() == ["g000/00", "g001/00"]


def test_priority_names_the_row_that_is_not_finite_or_below_zero() -> None:
    frame = rows(experiences(3, reward=(0.5, -1.0, 2.0)))
    with pytest.raises(
        OperatorError, match=r"got -1.0 for experience_id 'g000/01' and 0 other rows"
    ):
        priority(expression="reward")(frame)
    with pytest.raises(OperatorError, match=r"got inf for experience_id 'g000/02'"):
        priority(expression="1 / (2 - reward)")(frame)
    assert priority(expression="2 - reward")(frame)["priority"].to_list() == [1.5, 3.0, 0.0]


def test_copy_best_copies_the_best_row_once_however_often_it_runs() -> None:
    frame = rows(experiences(8, reward=(0.0, 1.0, 1.0, None, None, None, None, None)))
    once = copy_best()(frame)
    [copy] = once.tail(-8).to_dicts()
    assert (copy["parent_id"], copy["source"], copy["reward"]) == ("g000/01", "synthetic", 1.0)
    assert copy["experience_id"] == f"g000/01/copy_best-{copy_best().fingerprint[:8]}"
    assert copy["group_id"] == copy["experience_id"]
    assert copy_best()(once).equals(once)


def test_copy_best_may_ask_for_a_reward() -> None:
    frame = rows(experiences(8, reward=(0.0, 0.2, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)))
    assert copy_best(min_reward=0.5)(frame)["parent_id"].drop_nulls().to_list() == ["g001/00"]
