"""Operators over tasks, and the pipeline that scores, weighs, mixes and takes the best of them."""

from collections.abc import Sequence

import polars as pl
import pytest

from rlake.operators import (
    difficulty,
    mix_tasksets,
    prompt_into_messages,
    text_quality,
    weighted_sum,
)
from rlake.pipelines import Pipeline, Table
from rlake.pipelines.source import Sql
from rlake.store import Experience, Store, Task
from rlake.store.errors import OperatorError


def tasks(**columns: Sequence[object]) -> pl.DataFrame:
    size = len(next(iter(columns.values())))
    return pl.DataFrame({"task_id": [f"t{i}" for i in range(size)], **columns}, strict=False)


def test_difficulty_is_the_share_that_failed_with_the_prior_beside() -> None:
    rows = tasks(num_scored=[4, 4, 0, None], num_passed=[1, 4, 0, None])
    assert rows.pipe(difficulty())["difficulty"].to_list() == [0.75, 0.0, None, None]
    smoothed = rows.pipe(difficulty(prior_mean=0.5, prior_count=2.0))["difficulty"].to_list()
    assert smoothed == pytest.approx([1 - 2 / 6, 1 - 5 / 6, None, None])


def test_quality_of_a_text_falls_with_symbols_and_repetition_and_is_null_without_text() -> None:
    texts = ["Ünser Test, with 3 words more", "a a a a", "### $$$ %%%", " \n", None]
    quality = tasks(prompt_text=texts).pipe(text_quality())["text_quality"]
    prose, loop, symbols, *rest = quality.to_list()
    assert rest == [None, None]
    assert prose == pytest.approx((23 / 24 + 1) / 2)
    assert loop == pytest.approx((1 + 1 / 4) / 2)
    assert symbols == pytest.approx((0 + 1) / 2)
    assert quality.is_between(0, 1).drop_nulls().all()


def test_a_weighted_sum_orders_tasks_as_the_plain_sum_does_and_keeps_null() -> None:
    values = {"quality": [0.1, 0.9, 0.5, None], "difficulty": [0.2, 0.8, 0.1, 0.3]}
    weights = {"quality": 1.0, "difficulty": -0.7}
    made = tasks(**values).pipe(weighted_sum(weights=weights))["priority"].to_list()
    plain = [q - 0.7 * d for q, d in zip([0.1, 0.9, 0.5], [0.2, 0.8, 0.1], strict=True)]
    assert made[3] is None
    assert made[:3] == pytest.approx([(p + 0.7) / 1.7 for p in plain])


def test_a_mix_has_the_shares_and_takes_the_same_rows_whatever_else_is_there() -> None:
    sets = ["easy"] * 60 + ["hard"] * 20 + ["other"] * 20
    rows = tasks(taskset=sets)
    kept, dropped = mix_tasksets(shares={"easy": 1, "hard": 1}).split(rows)
    assert dict(kept.group_by("taskset").len().rows()) == {"easy": 20, "hard": 20}
    fewer = mix_tasksets(shares={"easy": 3, "hard": 1}, rows=20)(rows)
    assert dict(fewer.group_by("taskset").len().rows()) == {"easy": 15, "hard": 5}
    assert set(fewer["task_id"]) <= set(kept["task_id"]), "fewer of the same"
    shuffled = mix_tasksets(shares={"easy": 1, "hard": 1})(
        rows.sample(fraction=1.0, shuffle=True, seed=1)
    )
    assert set(shuffled["task_id"]) == set(kept["task_id"])
    reasons = dict(dropped.group_by("taskset").agg(pl.col("reason").first()).rows())
    assert reasons["easy"] == "the taskset `easy` has its share of the mix already"
    assert reasons["other"] == "the taskset `other` has no share of the mix"


def test_a_mix_of_a_set_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(OperatorError, match=r"no row has the taskset `eazy`; did you mean `easy`"):
        mix_tasksets(shares={"eazy": 1})(tasks(taskset=["easy", "hard"]))


def test_a_cleaned_prompt_becomes_what_is_tried() -> None:
    asked = '[{"role": "system", "content": "x"}, {"role": "user", "content": " 2  + 2"}]'
    rows = tasks(prompt_text=["2 + 2", None], messages=[asked, asked])
    first, second = rows.pipe(prompt_into_messages())["messages"].to_list()
    assert first == asked.replace(" 2  + 2", "2 + 2")
    assert second == asked


def test_tasks_are_scored_from_history_by_a_pipeline_and_chosen_by_what_it_stored(
    store: Store,
) -> None:
    made = [Task.ask(f"How many is {i} and one?", str(i + 1)) for i in range(4)]
    store.append("tasks", made)
    tries = [
        Experience(
            task_id=task.task_id,
            experience_id=f"{i}/{k}",
            group_id=f"{i}",
            rollout_index=k,
            reward=0.5,
            rewards={"accuracy": float(k < i), "format": 0.5},
        )
        for i, task in enumerate(made[:3])
        for k in range(4)
    ]
    store.append("experiences", tries)
    scored = Pipeline(
        name="scored",
        source=Sql(
            "SELECT t.*, num_scored, num_passed FROM tasks t "
            "LEFT JOIN task_pass_rates USING (task_id)"
        ),
        operators=[
            "difficulty",
            "text_quality",
            {"weighted_sum": {"weights": {"text_quality": 1.0, "difficulty": -1.0}}},
        ],
        sink=Table("task_values"),
    )
    scored.run(store)
    values = dict(
        store.sql(
            "SELECT task_id, value FROM task_values_current WHERE name = 'difficulty'"
        ).fetchall()
    )
    got = [values.get(t.task_id) for t in made]
    assert got == [1.0, 0.75, 0.5, None], "what was never tried has no difficulty"
    names = store.sql("SELECT name, count(*) FROM task_values_current GROUP BY name ORDER BY name")
    assert names.fetchall() == [("difficulty", 3), ("priority", 3), ("text_quality", 4)]
