"""The law of each kind, over every public operator, and caught where one is broken on purpose."""

import math
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
from builders import experiences, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rlake import operators
from rlake.operators import Explained, Operator, OperatorFunction, operator
from rlake.operators.laws import check
from rlake.store.errors import OperatorError

PUBLIC = {n: f for n, f in vars(operators).items() if isinstance(f, OperatorFunction)}

EXAMPLES: dict[str, Any] = {"where": "reward > 0.5", "expression": "abs(reward)"}
"""Values for parameters that have no default, by name."""

reward_values = st.none() | st.sampled_from([0.0, 1.0, 0.1]) | st.floats(-5, 5, width=32)


@st.composite
def frames(draw: st.DrawFn) -> pl.DataFrame:
    made = draw(
        st.lists(st.tuples(st.integers(0, 3), reward_values, st.text(max_size=8)), max_size=12)
    )
    records = [
        one
        for i, (group, reward, text) in enumerate(made)
        for one in experiences(
            1,
            reward=reward,
            experience_id=f"e{(i * 7) % 13:02d}",  # not in the order of rows
            group_id=f"g{group}",
            response_text=text,
            source=draw(st.sampled_from(["explorer", "synthetic"])),
            token_ids=[1, 2],
            run_id="small",
            step=3,
        )
    ]
    return rows(records).with_columns(answer=pl.lit("1"))


def built(function: OperatorFunction[...]) -> Operator:
    needed = [
        n for n, p in function.parameters.signature.parameters.items() if p.default is p.empty
    ]
    return function(**{name: EXAMPLES[name] for name in needed})


def by_id(frame: pl.DataFrame, drop: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    return {
        r["experience_id"]: {k: v for k, v in r.items() if k not in drop} for r in frame.to_dicts()
    }


def same_ids_and_only_declared_columns(
    op: Operator, before: pl.DataFrame, after: pl.DataFrame
) -> None:
    assert after["experience_id"].to_list() == before["experience_id"].to_list()
    assert set(after.columns) - set(before.columns) <= set(op.writes)
    kept = [c for c in before.columns if c not in op.writes]
    assert after.select(kept).to_dicts() == before.select(kept).to_dicts()


def clean(op: Operator, before: pl.DataFrame, after: pl.DataFrame, _: pl.DataFrame) -> None:
    same_ids_and_only_declared_columns(op, before, after)
    assert after.schema == before.schema


def derive(op: Operator, before: pl.DataFrame, after: pl.DataFrame, _: pl.DataFrame) -> None:
    same_ids_and_only_declared_columns(op, before, after)
    assert set(op.writes) <= set(after.columns)


def filter_(op: Operator, before: pl.DataFrame, after: pl.DataFrame, dropped: pl.DataFrame) -> None:
    old, new, gone = by_id(before), by_id(after), by_id(dropped)
    assert sorted([*new, *gone]) == sorted(old)
    assert {i: old[i] for i in new} == new
    assert after.height == len(new)
    assert all(row["reason"] for row in gone.values())
    if op.whole_groups:
        assert not {r["group_id"] for r in new.values()} & {old[i]["group_id"] for i in gone}


def prioritize(op: Operator, before: pl.DataFrame, after: pl.DataFrame, _: pl.DataFrame) -> None:
    same_ids_and_only_declared_columns(op, before, after)
    assert len(op.writes) == 1
    assert all(v is None or (math.isfinite(v) and v >= 0) for v in after[op.writes[0]])


def augment(_: Operator, before: pl.DataFrame, after: pl.DataFrame, __: pl.DataFrame) -> None:
    new = after.tail(after.height - before.height)
    assert after.head(before.height).to_dicts() == before.to_dicts()
    assert after["experience_id"].n_unique() == after.height
    assert after.schema == before.schema
    assert set(new["parent_id"]) <= set(before["experience_id"])
    assert set(new.select("run_id", "step").rows()) <= {(None, None)}


def reshape(op: Operator, before: pl.DataFrame, after: pl.DataFrame, dropped: pl.DataFrame) -> None:
    named = {i for c in op.links for i in after[c]}
    gone = by_id(dropped)
    assert op.links
    assert not named & set(gone)
    assert named | set(gone) == set(before["experience_id"])
    assert all(row["reason"] for row in gone.values())


LAWS: dict[str, Callable[[Operator, pl.DataFrame, pl.DataFrame, pl.DataFrame], None]] = {
    "clean": clean,
    "derive": derive,
    "filter": filter_,
    "prioritize": prioritize,
    "augment": augment,
    "reshape": reshape,
}


@pytest.mark.parametrize("name", PUBLIC)
@settings(max_examples=25, deadline=None)
@given(before=frames())
def test_every_public_operator_obeys_the_law_of_its_kind(name: str, before: pl.DataFrame) -> None:
    op = built(PUBLIC[name])
    applied = op.apply(before)
    LAWS[op.kind](op, before, applied.rows, applied.dropped)
    assert op(before.lazy()).collect().to_dicts() == applied.rows.to_dicts()


def test_every_kind_has_a_public_operator() -> None:
    assert {f.kind for f in PUBLIC.values()} == set(LAWS)


def test_every_public_operator_is_exported_and_has_an_example() -> None:
    assert set(PUBLIC) <= set(operators.__all__)
    assert [n for n, f in PUBLIC.items() if ">>>" not in (f.__doc__ or "")] == []


@operator("clean")
def cleans_by_dropping() -> Any:
    return lambda frame: frame.filter(pl.col("reward") > 0)


@operator("clean", writes=("response_text",))
def cleans_by_sorting() -> Any:
    return lambda frame: frame.sort("experience_id", descending=True)


@operator("clean", writes=("response_text",))
def cleans_what_it_does_not_say() -> Any:
    return lambda frame: frame.with_columns(reward=pl.lit(9.0))


@operator("clean")
def cleans_into_another_type() -> Any:
    return pl.col("reward").cast(pl.String)


@operator("derive", writes=("quality",))
def derives_nothing() -> Any:
    return lambda frame: frame


@operator("derive", writes=("quality",))
def derives_more_than_it_says() -> Any:
    return lambda frame: frame.with_columns(quality=1.0, other=2.0)


@operator("derive")
def derives_by_sql_without_rows() -> Any:
    return "SELECT * FROM input WHERE reward > 0"


@operator("filter")
def filters_by_invention() -> Any:
    return lambda frame: frame.with_columns(
        pl.format("{}!", "experience_id").alias("experience_id")
    )


@operator("filter")
def filters_by_repetition() -> Any:
    return lambda frame: pl.concat([frame, frame])


@operator("filter")
def filters_and_changes() -> Any:
    return lambda frame: frame.filter(pl.col("reward") > 0).with_columns(reward=pl.lit(9.0))


@operator("filter")
def filters_without_a_reason() -> Any:
    return Explained(pl.col("reward") > 0, reason=pl.lit(None, pl.String))


@operator("filter")
def filters_by_a_number() -> Any:
    return pl.col("reward") * 2


@operator("filter", whole_groups=True)
def filters_groups_apart() -> Any:
    return pl.col("reward") > 0


@operator("prioritize")
def prioritizes_below_zero() -> Any:
    return pl.col("reward") - 1


@operator("prioritize")
def prioritizes_to_infinity() -> Any:
    return 1 / pl.col("reward")


@operator("prioritize", writes=("priority", "advantage"))
def prioritizes_twice() -> Any:
    return [pl.lit(1.0).alias("priority"), pl.lit(1.0).alias("advantage")]


@operator("augment")
def augments_without_parent() -> Any:
    return lambda frame: frame.head(1).with_columns(
        experience_id=pl.lit("new"), parent_id=pl.lit("x")
    )


@operator("augment")
def augments_with_old_ids() -> Any:
    return lambda frame: frame.head(1).with_columns(parent_id=pl.col("experience_id"))


@operator("augment")
def augments_with_new_columns() -> Any:
    return lambda frame: frame.head(1).with_columns(parent_id=pl.col("experience_id"), quality=1.0)


@operator("reshape", links=("chosen_id",))
def reshapes_strangers() -> Any:
    return lambda frame: frame.select(chosen_id=pl.format("{}!", "experience_id"))


@operator("reshape", links=("chosen_id",))
def reshapes_without_links() -> Any:
    return lambda frame: frame.select("task_id")


@pytest.mark.parametrize(
    ("planted", "law"),
    [
        (cleans_by_dropping, "same ids in the same order"),
        (cleans_by_sorting, "same ids in the same order"),
        (cleans_what_it_does_not_say, "changed the column `reward` without declaring"),
        (cleans_into_another_type, "not types"),
        (derives_nothing, "no column `quality`"),
        (derives_more_than_it_says, "added the column `other`"),
        (derives_by_sql_without_rows, "same ids in the same order"),
        (filters_by_invention, "not the id of a row that was given"),
        (filters_by_repetition, "not the id of one row"),
        (filters_and_changes, "changed the column `reward`"),
        (filters_without_a_reason, "without a reason"),
        (filters_by_a_number, "expected true or false"),
        (filters_groups_apart, "cut the group 'g000'"),
        (prioritizes_below_zero, r"finite and not negative, got -1.0 for experience_id 'g000/01'"),
        (prioritizes_to_infinity, "finite and not negative, got inf"),
        (prioritizes_twice, "exactly one column"),
        (augments_without_parent, "`parent_id` holds 'x'"),
        (augments_with_old_ids, "fresh id"),
        (augments_with_new_columns, "column `quality`, which old rows have not"),
        (reshapes_strangers, "not the id of a row that was given"),
        (reshapes_without_links, "no column `chosen_id`"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_operator_that_breaks_its_law_is_named_with_the_law(
    planted: OperatorFunction[...], law: str
) -> None:
    with pytest.raises(OperatorError, match=law) as caught:
        planted().apply(rows(experiences(4, reward=(1.0, 0.0, 0.0, 1.0))))
    assert f"operator `{planted.name}`" in str(caught.value)


@pytest.mark.parametrize("column", ["run_id", "step"])
def test_a_new_row_of_an_augment_that_names_a_run_breaks_the_law(column: str) -> None:
    before = rows(experiences(1, reward=1.0, run_id="small", step=3))
    op = operators.best_of_group()
    applied = op.apply(before)
    in_the_run = applied.rows.with_columns(pl.col(column).forward_fill())
    with pytest.raises(OperatorError, match=f"belong to no run, expected `{column}` NULL, got"):
        check(op, before, in_the_run, applied.dropped)
