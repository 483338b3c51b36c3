"""Priorities: columns, expressions over any column, side columns, age and times drawn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import experiences
from support.draws import a_store, draws, flat, names
from support.table_rows import event

from rlake.store import Store
from rlake.store.errors import QueryError
from rlake.store.replay import Prioritized, Sampler

EXAMPLES = settings(max_examples=4)


def chances(
    sampler: Sampler, *, version: int = 0, columns: Sequence[str] = ("experience_id",)
) -> dict[str, float]:
    """The chance of each row, which its importance weight (beta is 1) tells, largest 1."""
    n = sampler.supply(1, version).fresh
    draw = sampler.draw(n, step=1, policy_version=version)
    assert draw is not None
    drawn = sampler.read(draw, columns)["experience_id"].to_list()
    least = draw.weights.min()
    return dict(sorted(zip(drawn, (least / draw.weights).round(9).tolist(), strict=True)))


def by(expression: str | pl.Expr) -> Prioritized:
    return Prioritized(expression, beta=1.0)


def stored(store: Store) -> None:
    """Append four rows of rewards 1 to 4, versions 0 to 3, with two parts of a reward each."""
    made = experiences(4)
    store.append(
        "experiences",
        [
            replace(
                e,
                reward=float(i + 1),
                rewards={"format": float(i % 2), "right": 1.0},
                policy_version=i if i < 3 else None,
                response_text="x" * (i + 1),
                token_ids=[7] * (4 - i),
            )
            for i, e in enumerate(made)
        ],
    )


def derived(i: int, value: float | None, **columns: Any) -> dict[str, Any]:
    row = {"experience_id": names(4)[i], "name": "priority", "version": "1", "value": value}
    return row | columns


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("reward", [0.25, 0.5, 0.75, 1.0]),
        ("REWARD", [0.25, 0.5, 0.75, 1.0]),
        ("experiences.reward * 2", [0.25, 0.5, 0.75, 1.0]),
        ("1", [1.0, 1.0, 1.0, 1.0]),
        ("rollout_index + 1 -- and a remark", [0.25, 0.5, 0.75, 1.0]),
        ("len(response_text)", [0.25, 0.5, 0.75, 1.0]),
        ("len(token_ids)", [1.0, 0.75, 0.5, 0.25]),
        ("map_from_entries(rewards)['format'] + 1", [0.5, 1.0, 0.5, 1.0]),
        ("CASE WHEN reward > 2 THEN 1.0 ELSE 0.5 END::DECIMAL(4, 2)", [0.5, 0.5, 1.0, 1.0]),
        ("coalesce(advantage, reward)", [0.25, 0.5, 0.75, 1.0]),
        (pl.col("reward"), [0.25, 0.5, 0.75, 1.0]),
        (pl.lit(3.0), [1.0, 1.0, 1.0, 1.0]),
        (pl.col("token_ids").list.len(), [1.0, 0.75, 0.5, 0.25]),
        (pl.when(pl.col("reward") > 2).then(1.0).otherwise(0.5), [0.5, 0.5, 1.0, 1.0]),
        (pl.col("response_text").str.len_chars() * pl.col("reward"), [1 / 16, 0.25, 9 / 16, 1.0]),
    ],
)
def test_a_priority_is_any_expression_over_the_columns(
    store: Store, expression: str | pl.Expr, expected: list[float]
) -> None:
    stored(store)
    found = chances(Sampler(store, strategy=by(expression)))
    assert list(found.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("reward >", "does not parse"),
        ("reward; SELECT 1", "does not parse"),
        ("", "is empty, expected a column or an expression"),
        ("rewrad * 2", "names a column `rewrad` that is not there; did you mean `reward`?"),
        ("response_text", "must be a number, got string; cast it"),
        ("reward > 1", "must be a number, got bool; cast it"),
        ("max(reward)", "cannot contain aggregates"),
        ("row_number() OVER ()", "cannot contain window functions"),
        ("(SELECT 1)", "has a subquery, expected an expression over the columns of one row"),
        ("reward * random()", "calls `random`, which gives another value each time"),
        ("day(age(created_at::TIMESTAMP))", "calls `age` of one time"),
        ("epoch(now())", "calls `now`, which gives another value each time"),
        (pl.col("rewrad"), "names a column `rewrad` that is not there; did you mean `reward`?"),
        (pl.col("reward").max(), "looks at more than one row"),
        (pl.col("reward").rank(), "looks at more than one row"),
        (pl.col("reward").shuffle(), "looks at more than one row"),
        (pl.col("reward", "priority"), "gives more than one column"),
        (pl.col("prompt_text"), "must be a number, got string"),
        (pl.col("reward").str.len_chars(), "is not valid: invalid series dtype"),
    ],
)
def test_a_wrong_priority_is_refused_before_there_are_rows(
    store: Store, expression: str | pl.Expr, message: str
) -> None:
    with pytest.raises(QueryError) as wrong:
        Sampler(store, strategy=by(expression))
    assert message in str(wrong.value)
    assert str(wrong.value).startswith("`priority` ")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("reward - 2", "-1.0"),
        ("1 / (reward - 1)", "inf"),
        ("(reward - 1) / (reward - 1)", "nan"),
        (pl.col("reward") - 2, "-1.0"),
        ("reward - 2 - times_drawn", "-1.0"),
    ],
)
def test_a_priority_that_is_no_chance_names_its_row_again_and_again(
    store: Store, expression: str | pl.Expr, value: str
) -> None:
    stored(store)
    sampler = Sampler(store, strategy=by(expression))
    for _ in range(2):
        with pytest.raises(QueryError) as wrong:
            sampler.supply(1, 0)
        assert f"is {value} for experience `g000/00`, expected a finite number" in str(wrong.value)


def test_a_row_that_may_not_be_drawn_may_have_any_priority(store: Store) -> None:
    stored(store)
    sampler = Sampler(store, strategy=by("reward - 2"), where="reward > 2")
    assert chances(sampler) == {"g000/02": 0.5, "g000/03": 1.0}


# names that change from draw to draw


def test_age_is_counted_in_optimizer_steps(store: Store) -> None:
    stored(store)
    sampler = Sampler(store, strategy=by("1.0 / (1 + age)"), max_draws=None)
    assert list(chances(sampler, version=2).values()) == pytest.approx([1 / 3, 1 / 2, 1, 1])
    assert list(chances(sampler, version=4).values()) == pytest.approx([1 / 5, 1 / 4, 1 / 3, 1])
    assert list(chances(sampler, version=0).values()) == [1.0] * 4, "newer rows have no age"


def test_times_drawn_is_counted(store: Store) -> None:
    stored(store)
    sampler = Sampler(store, strategy=by("(times_drawn < 2)::INT"), max_draws=None)
    seen = flat(draws(sampler, 4, [1, 2]))
    assert sorted(seen) == sorted(names(4) * 2)
    supply = sampler.supply(1, 0)
    assert (supply.fresh, supply.weightless, supply.enough) == (0, 4, False)


def test_a_group_is_weighed_by_the_mean_of_its_rows_at_the_draw(store: Store) -> None:
    made = experiences(8)
    store.append("experiences", [replace(e, policy_version=i // 2) for i, e in enumerate(made)])
    sampler = Sampler(store, strategy=by(pl.col("age") + 1), grouped=True)
    draw = sampler.draw(2, step=1, policy_version=3)
    assert draw is not None
    ids = sampler.read(draw, ["group_id"])["group_id"].to_list()
    weights = dict(zip(ids, draw.weights.tolist(), strict=True))
    assert weights == pytest.approx({"g000": 1.5 / 3.5, "g001": 1.0})


# side columns


def test_a_new_priority_is_a_new_row_and_the_newest_counts(store: Store) -> None:
    stored(store)
    sampler = Sampler(
        store, strategy=by("priority"), with_columns=["derived:priority"], max_draws=None
    )
    store.append("experience_values", [derived(i, float(i + 1)) for i in range(4)])
    assert list(chances(sampler).values()) == [0.25, 0.5, 0.75, 1.0]
    store.append("experience_values", [derived(0, 4.0, version="2"), derived(3, None, version="2")])
    store.append(
        "experience_values", [derived(1, 1.0, name="quality"), derived(2, 1.0, version="2")]
    )
    assert list(chances(sampler).values()) == [1.0, 0.5, 0.25, 1.0]
    assert sampler.drawn_from == {"experience_values": 4, "experiences": 2, "job_events": 1}


def test_a_side_column_may_come_before_its_row(store: Store) -> None:
    store.append("scores", [
        {"experience_id": i, "scorer": "strict", "scorer_version": "2", "value": v}
        for i, v in zip(names(3), (4.0, 2.0, 1.0), strict=True)
    ])  # fmt: skip
    sampler = Sampler(store, strategy=by("s + reward"), with_columns=["s=score:strict@2"])
    assert sampler.supply(1, 0).fresh == 0
    stored(store)
    assert list(chances(sampler).values()) == pytest.approx([1.0, 0.8, 0.8, 1.0])


def test_labels_of_people_can_be_weighed(store: Store) -> None:
    stored(store)
    expression = "CASE label WHEN 'good' THEN 4 WHEN 'bad' THEN 1 ELSE 2 END / (1.0 + age)"
    label = {"annotator": "ann", "feedback_id": "1", "experience_id": "g000/01", "label": "good"}
    store.append("feedback", [label])
    sampler = Sampler(
        store, strategy=by(expression), with_columns=["feedback:label"], max_draws=None
    )
    assert list(chances(sampler).values()) == [0.5, 1.0, 0.5, 0.5]
    store.append("feedback", [label | {"feedback_id": "2", "label": "bad"}])
    store.append("feedback", [label | {"feedback_id": "3", "label": None, "comment": "hm"}])
    assert list(chances(sampler).values()) == [1.0, 0.5, 1.0, 1.0]


def test_what_a_superseded_attempt_derived_does_not_count(store: Store) -> None:
    stored(store)
    store.append("job_events", [event()])
    sampler = Sampler(store, strategy=by("p"), with_columns=["p=derived:priority"], max_draws=None)
    made = {"run_id": "r", "attempt": 1}
    for step in range(1, 4):
        rows = [derived(i, float(1 + step * (i == 0)), version=str(step)) for i in range(4)]
        store.append("experience_values", [row | made | {"step": step} for row in rows])
    assert list(chances(sampler).values()) == [1.0, 0.25, 0.25, 0.25]
    store.append("job_events", [event(attempt=2, start_step=3)])
    assert list(chances(sampler).values()) == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3])
    store.append(
        "experience_values", [derived(1, 6.0, version="4") | made | {"attempt": 2, "step": 3}]
    )
    assert list(chances(sampler).values()) == pytest.approx([0.5, 1.0, 1 / 6, 1 / 6])


@pytest.mark.parametrize("unit", ["rows", "groups"])
@pytest.mark.parametrize("expression", ["reward * p", "reward * p / (1 + age)"])
@EXAMPLES
@given(data=st.data())
def test_priorities_that_followed_equal_those_of_a_fresh_sampler(
    empty_store: Any, unit: str, expression: str, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    options: dict[str, Any] = {
        "strategy": by(expression),
        "with_columns": ["p=derived:priority"],
        "grouped": unit == "groups",
        "max_draws": None,
    }
    made = experiences(32, reward=[1.0, 2.0, 0.5])
    with a_store(empty_store) as store:
        following = Sampler(store, **options)
        for version in range(data.draw(st.integers(2, 4), label="commits")):
            some = rng.choice(32, rng.integers(1, 16), replace=False)
            if data.draw(st.booleans(), label="rows come"):
                store.append("experiences", [made[i] for i in some])
            values = [
                {**derived(0, float(rng.integers(0, 5))), "experience_id": made[i].experience_id,
                 "version": str(version)}
                for i in rng.choice(32, 5, replace=False)
            ]  # fmt: skip
            store.append("experience_values", values)
            following.supply(1, 3)
            fresh = Sampler(store, **options)
            assert following.supply(4, 3) == fresh.supply(4, 3)
            n = fresh.supply(1, 3).fresh
            assert (n == 0) or (
                draws(following, n, [version], version=3) == draws(fresh, n, [version], version=3)
            )
