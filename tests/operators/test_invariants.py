"""The law of each kind, over every public operator, and caught where one is broken on purpose."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import experiences, rows

from rlake import operators
from rlake.operators import Applied, Explained, Operator, OperatorFunction, operator
from rlake.operators.invariants import check
from rlake.operators.scope import sees_of
from rlake.store.errors import OperatorError

PUBLIC = {n: f for n, f in vars(operators).items() if isinstance(f, OperatorFunction)}

EXAMPLES: dict[str, Any] = {
    "where": "reward > 0.5",
    "expression": "abs(reward)",
    "operator": {"clean_email_mapper": {}},
    "formula": "reward + coalesce(rewards['format'], 0)",
    "baseline": "rollout",
    "prediction": "reward",
    "half_life": 2.0,
    "k": 2,
    "max_tokens": 8,
    "cache": 4,
    "shares": {"default": 1.0},
    "weights": {"difficulty": -1.0},
    "policy": "rlake.operators.paraphrases:echo",
    "share": 0.5,
    "stops": ["a", "think"],
}
"""Values for parameters that have no default, by name."""

CHOSEN: dict[str, dict[str, Any]] = {
    "keep_reward_between": {"low": 0.05},
    "keep_length_between": {"high": 4},
    "drop_near_duplicates": {"within": "group"},
}
"""Values for parameters that have one, by operator."""

reward_values = st.none() | st.sampled_from([0.0, 1.0, 0.1]) | st.floats(-5, 5, width=32)

response_texts = st.text(max_size=8) | st.sampled_from(["ok", "OK ", "<think>a</think>b", "a@b.de"])


@st.composite
def frames(draw: st.DrawFn) -> pl.DataFrame:
    made = draw(st.lists(st.tuples(st.integers(0, 3), reward_values, response_texts), max_size=12))
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
            finish_reason=draw(st.sampled_from([None, "stop", "length", "error"])),
            token_ids=[1, 2],
            run_id="small",
            step=3,
        )
    ]
    return rows(records).with_columns(
        answer=pl.lit("1"),
        taskset=pl.lit("default"),
        difficulty=pl.lit(0.25),
        num_scored=pl.lit(8),
        num_passed=pl.lit(2),
    )


@cache
def built(name: str) -> Operator:
    function = PUBLIC[name]
    needed = [
        n for n, p in function.parameters.signature.parameters.items() if p.default is p.empty
    ]
    return function(**{name: EXAMPLES[name] for name in needed}, **CHOSEN.get(name, {}))


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


def parts_of(op: Operator, before: pl.DataFrame, is_first: list[bool]) -> list[pl.DataFrame]:
    """Cut rows in two: by groups, or by rows; what looks at all of them gets them again."""
    if op.scope == "all":
        return [before]
    unit = "group_id" if op.scope == "group" else "experience_id"
    places = {name: i for i, name in enumerate(before[unit].unique(maintain_order=True))}
    mask = pl.Series([is_first[places[n] % len(is_first)] for n in before[unit]], dtype=pl.Boolean)
    return [before.filter(mask), before.filter(~mask)]


def sees_no_more_than_it_says(
    op: Operator, before: pl.DataFrame, whole: Applied, is_first: list[bool]
) -> None:
    parts = [op.apply(part) for part in parts_of(op, before, is_first)]
    made = pl.concat([p.rows for p in parts], how="vertical_relaxed")
    key = "experience_id" if op.kind != "reshape" else made.columns[0]
    if op.kind == "augment":  # a copy that was made before may stand in the other part
        made = made.sort("parent_id", nulls_last=False).unique(key, keep="first")
    assert made.sort(key).equals(whole.rows.sort(key))
    for name in ("dropped", "failed"):
        told = pl.concat([getattr(p, name) for p in parts]).sort("experience_id")
        assert told.equals(getattr(whole, name).sort("experience_id"))


@pytest.mark.parametrize("name", PUBLIC)
@settings(max_examples=12, deadline=None)
@given(before=frames(), is_first=st.lists(st.booleans(), min_size=2, max_size=6))
def test_every_public_operator_obeys_its_law_and_sees_no_more_than_it_says(
    name: str, before: pl.DataFrame, is_first: list[bool]
) -> None:
    op = built(name)
    whole = op.apply(before)
    LAWS[op.kind](op, before, whole.rows, whole.dropped)
    assert op(before.lazy()).collect().to_dicts() == whole.rows.to_dicts()
    sees_no_more_than_it_says(op, before, whole, is_first)


@operator("derive", scope="row", writes=("advantage",))
def looks_at_other_rows() -> Any:
    return lambda frame: frame.with_columns(advantage=pl.col("reward") - pl.col("reward").mean())


@operator("filter", scope="row")
def looks_at_its_group() -> Any:
    return Explained(pl.col("reward") == pl.col("reward").max().over("group_id"), reason="worse")


@operator("filter", scope="group")
def looks_at_other_groups() -> Any:
    return Explained(pl.col("group_id") == pl.col("group_id").max(), reason="not of the last group")


@operator("filter", scope="row")
def tells_of_other_rows() -> Any:
    return Explained(pl.col("reward") > 0, reason=pl.format("one of {}", pl.len()))


@operator("augment", scope="row")
def copies_the_first() -> Any:
    return lambda frame: frame.head(1).with_columns(
        parent_id=pl.col("experience_id"), experience_id=pl.lit(None, pl.String)
    )


@operator("reshape", links=("chosen_id",), scope="row")
def numbers_all_rows() -> Any:
    return lambda frame: frame.select(chosen_id="experience_id", number=pl.int_range(pl.len()))


@pytest.mark.parametrize(
    "planted",
    [
        looks_at_other_rows,
        looks_at_its_group,
        looks_at_other_groups,
        tells_of_other_rows,
        copies_the_first,
        numbers_all_rows,
    ],
    ids=lambda planted: planted.name,
)
def test_an_operator_that_sees_more_than_it_says_is_caught(planted: OperatorFunction[...]) -> None:
    before = rows(experiences(8, reward=(1.0, 0.0, 0.5, 0.2, 0.1)))
    op = planted()
    whole = op.apply(before)
    with pytest.raises(AssertionError):
        sees_no_more_than_it_says(op, before, whole, [True, False])


@pytest.mark.parametrize(
    ("expression", "sees"),
    [
        (pl.col("reward") * 2 > 1, "row"),
        (pl.when(pl.col("reward") > 1).then(pl.col("response_text")), "row"),
        (pl.col("rewards").list.len().is_in([1, 2]), "row"),
        (pl.col("reward") - pl.col("reward").mean(), "all"),
        (pl.col("reward") / pl.len(), "all"),
        (pl.col("task_id").is_in(pl.col("parent_id").implode()), "all"),
        (pl.when(pl.col("reward") > pl.len()).then(1), "all"),
        (pl.col("reward").max().over("group_id"), "all"),
        (pl.col("reward").map_batches(lambda s: s - s.mean(), return_dtype=pl.Float64), "all"),
    ],
    ids=str,
)
def test_what_an_expression_looks_at_is_found_also_deep_within(
    expression: pl.Expr, sees: str
) -> None:
    assert sees_of(expression) == sees


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


@operator("clean", writes=("experience_id",))
def cleans_ids() -> Any:
    return pl.col("experience_id").str.to_uppercase()


@operator("clean", writes=("experience_id",))
def cleans_ids_away() -> Any:
    return pl.lit(None, pl.String).alias("experience_id")


@operator("clean")
def cleans_what_is_not_there() -> Any:
    return pl.col("response_text").alias("answer_text")


@operator("derive", writes=("quality",))
def derives_each_row_twice() -> Any:
    return lambda frame: pl.concat([frame, frame]).with_columns(quality=1.0)


@operator("derive", writes=("quality",))
def derives_and_retypes() -> Any:
    return lambda frame: frame.with_columns(pl.col("reward").cast(pl.Float32), quality=1.0)


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


@operator("filter")
def filters_to_no_id() -> Any:
    return lambda frame: frame.with_columns(experience_id=pl.lit(None, pl.String))


@operator("filter")
def filters_and_adds() -> Any:
    return lambda frame: frame.filter(pl.col("reward") > 0).with_columns(quality=1.0)


@operator("filter", whole_groups=True)
def filters_groups_apart() -> Any:
    return pl.col("reward") > 0


@operator("prioritize")
def prioritizes_below_zero() -> Any:
    return pl.col("reward") - 1


@operator("prioritize")
def prioritizes_to_infinity() -> Any:
    return 1 / pl.col("reward")


@operator("prioritize")
def prioritizes_to_no_number() -> Any:
    return 0 * pl.col("reward") / (pl.col("reward") - 1)


@operator("prioritize")
def prioritizes_by_a_text() -> Any:
    return pl.col("response_text")


@operator("prioritize", writes=("priority", "advantage"))
def prioritizes_twice() -> Any:
    return [pl.lit(1.0).alias("priority"), pl.lit(1.0).alias("advantage")]


@operator("augment")
def augments_without_parent() -> Any:
    return lambda frame: frame.head(1).with_columns(
        experience_id=pl.lit("new"), parent_id=pl.lit("x")
    )


@operator("augment")
def augments_without_any_parent() -> Any:
    return lambda frame: frame.head(1).with_columns(
        experience_id=pl.lit("new"), parent_id=pl.lit(None, pl.String)
    )


@operator("augment")
def augments_twice_with_one_id() -> Any:
    return lambda frame: frame.head(2).with_columns(
        parent_id=pl.col("experience_id"), experience_id=pl.lit("new")
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
def reshapes_nothing_known() -> Any:
    return lambda frame: frame.select(chosen_id=pl.lit(None, pl.String))


@operator("reshape", links=("chosen_id",))
def reshapes_without_a_reason() -> Any:
    return Explained(
        lambda frame: frame.select(chosen_id="experience_id").head(1),
        reason=pl.lit(None, pl.String),
    )


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
        (cleans_ids, "same ids in the same order"),
        (cleans_ids_away, "same ids in the same order"),
        (cleans_what_is_not_there, "`answer_text` was not there"),
        (derives_each_row_twice, "same ids in the same order"),
        (derives_and_retypes, "changed the column `reward` without declaring"),
        (derives_nothing, "no column `quality`"),
        (derives_more_than_it_says, "added the column `other`"),
        (derives_by_sql_without_rows, "same ids in the same order"),
        (filters_by_invention, "not the id of a row that was given"),
        (filters_by_repetition, "not the id of one row"),
        (filters_and_changes, "changed the column `reward`"),
        (filters_without_a_reason, "without a reason"),
        (filters_by_a_number, "expected true or false"),
        (filters_to_no_id, "`experience_id` holds None, which is not the id"),
        (filters_and_adds, "added the column `quality`"),
        (filters_groups_apart, "cut the group 'g000'"),
        (prioritizes_below_zero, r"finite and not negative, got -1.0 for experience_id 'g000/01'"),
        (prioritizes_to_infinity, "finite and not negative, got inf"),
        (prioritizes_to_no_number, "finite and not negative, got nan"),
        (prioritizes_by_a_text, "must be a number, got String"),
        (prioritizes_twice, "exactly one column"),
        (augments_without_parent, "`parent_id` holds 'x'"),
        (augments_without_any_parent, "`parent_id` holds None"),
        (augments_twice_with_one_id, "'new' is not the id of one row"),
        (augments_with_old_ids, "fresh id"),
        (augments_with_new_columns, "column `quality`, which old rows have not"),
        (reshapes_strangers, "not the id of a row that was given"),
        (reshapes_nothing_known, "`chosen_id` holds None"),
        (reshapes_without_a_reason, "without a reason"),
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


def test_a_group_without_a_name_may_not_be_cut_either() -> None:
    before = rows(experiences(4, reward=(1.0, 0.0))).with_columns(group_id=pl.lit(None, pl.String))
    with pytest.raises(OperatorError, match="cut the group None"):
        filters_groups_apart().apply(before)
