"""The law of each kind, over every public operator, and caught where one is broken on purpose."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import experiences, rows, table

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
    "baseline": "rollout_index",
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
        {
            "reward": reward,
            "experience_id": f"e{(i * 7) % 13:02d}",  # not in the order of rows
            "group_id": f"g{group}",
            "response_text": text,
            "source": draw(st.sampled_from(["explorer", "synthetic"])),
            "finish_reason": draw(st.sampled_from([None, "stop", "length", "error"])),
            **{"token_ids": [1, 2], "run_id": "small", "batch": 3},
        }
        for i, (group, reward, text) in enumerate(made)
    ]
    return table(records).with_columns(
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
    assert set(new.select("run_id", "batch").rows()) <= {(None, None)}


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
@settings(max_examples=12)
@given(before=frames(), is_first=st.lists(st.booleans(), min_size=2, max_size=6))
def test_every_public_operator_obeys_its_law_and_sees_no_more_than_it_says(
    name: str, before: pl.DataFrame, is_first: list[bool]
) -> None:
    op = built(name)
    whole = op.apply(before)
    LAWS[op.kind](op, before, whole.rows, whole.dropped)
    assert op(before.lazy()).collect().to_dicts() == whole.rows.to_dicts()
    sees_no_more_than_it_says(op, before, whole, is_first)


ID, REWARD, TEXT = pl.col("experience_id"), pl.col("reward"), pl.col("response_text")
NEW, NO_ID = pl.lit("new"), pl.lit(None, pl.String)


def planted(kind: Any, declared: dict[str, Any], body: Any) -> Operator:
    """Build an operator with a body that breaks what is declared."""

    @operator(kind, **declared)
    def planted() -> Any:
        return body

    return planted()


ROW, LINK = {"scope": "row"}, {"links": ("chosen_id",)}
SEES_MORE: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "other rows": (
        "derive",
        ROW | {"writes": ("advantage",)},
        lambda frame: frame.with_columns(advantage=REWARD - REWARD.mean()),
    ),
    "its group": ("filter", ROW, Explained(REWARD.max().over("group_id") == REWARD, "worse")),
    "other groups": (
        "filter",
        {"scope": "group"},
        Explained(pl.col("group_id") == pl.col("group_id").max(), "not of the last group"),
    ),
    "a reason": ("filter", ROW, Explained(REWARD > 0, reason=pl.format("one of {}", pl.len()))),
    "the first row": (
        "augment",
        ROW,
        lambda frame: frame.head(1).with_columns(parent_id=ID, experience_id=NO_ID),
    ),
    "a number of rows": (
        "reshape",
        ROW | LINK,
        lambda frame: frame.select(chosen_id="experience_id", number=pl.int_range(pl.len())),
    ),
}


@pytest.mark.parametrize("what", SEES_MORE)
def test_an_operator_that_sees_more_than_it_says_is_caught(what: str) -> None:
    before = rows(experiences(8, reward=(1.0, 0.0, 0.5, 0.2, 0.1)))
    op = planted(*SEES_MORE[what])
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


WRITES_TEXT, WRITES_QUALITY = {"writes": ("response_text",)}, {"writes": ("quality",)}
WRITES_ID, BOTH = {"writes": ("experience_id",)}, {"writes": ("priority", "advantage")}
ORDER, UNDECLARED = "same ids in the same order", "changed the column `reward` without declaring"
CUT: Any = ("filter", {"whole_groups": True}, REWARD > 0)

BROKEN: list[tuple[Any, dict[str, Any], Any, str]] = [
    ("clean", {}, lambda f: f.filter(REWARD > 0), ORDER),
    ("clean", WRITES_TEXT, lambda f: f.sort("experience_id", descending=True), ORDER),
    ("clean", WRITES_TEXT, lambda f: f.with_columns(reward=pl.lit(9.0)), UNDECLARED),
    ("clean", {}, REWARD.cast(pl.String), "not types"),
    ("clean", WRITES_ID, ID.str.to_uppercase(), ORDER),
    ("clean", WRITES_ID, NO_ID.alias("experience_id"), ORDER),
    ("clean", {}, TEXT.alias("answer_text"), "`answer_text` was not there"),
    ("derive", WRITES_QUALITY, lambda f: pl.concat([f, f]).with_columns(quality=1.0), ORDER),
    (
        "derive",
        WRITES_QUALITY,
        lambda f: f.with_columns(REWARD.cast(pl.Float32), quality=1.0),
        UNDECLARED,
    ),
    ("derive", WRITES_QUALITY, lambda f: f, "no column `quality`"),
    (
        "derive",
        WRITES_QUALITY,
        lambda f: f.with_columns(quality=1.0, x=2.0),
        "added the column `x`",
    ),
    ("derive", {}, "SELECT * FROM input WHERE reward > 0", ORDER),
    (
        "filter",
        {},
        lambda f: f.with_columns(experience_id=pl.format("{}!", ID)),
        "not the id of a row that was given",
    ),
    ("filter", {}, lambda f: pl.concat([f, f]), "not the id of one row"),
    ("filter", {}, lambda f: f.filter(REWARD > 0).with_columns(reward=pl.lit(9.0)), UNDECLARED),
    ("filter", {}, Explained(REWARD > 0, reason=NO_ID), "without a reason"),
    ("filter", {}, REWARD * 2, "expected true or false"),
    (
        "filter",
        {},
        lambda f: f.with_columns(experience_id=NO_ID),
        "`experience_id` holds None, which is not the id",
    ),
    (
        "filter",
        {},
        lambda f: f.filter(REWARD > 0).with_columns(quality=1.0),
        "added the column `quality`",
    ),
    (*CUT, "cut the group 'g000'"),
    (
        "prioritize",
        {},
        REWARD - 1,
        r"finite and not negative, got -1.0 for experience_id 'g000/01'",
    ),
    ("prioritize", {}, 1 / REWARD, "finite and not negative, got inf"),
    ("prioritize", {}, 0 * REWARD / (REWARD - 1), "finite and not negative, got nan"),
    ("prioritize", {}, TEXT, "must be a number, got String"),
    ("prioritize", BOTH, [pl.lit(1.0).alias(n) for n in BOTH["writes"]], "exactly one column"),
    (
        "augment",
        {},
        lambda f: f.head(1).with_columns(experience_id=NEW, parent_id=pl.lit("x")),
        "`parent_id` holds 'x'",
    ),
    (
        "augment",
        {},
        lambda f: f.head(1).with_columns(experience_id=NEW, parent_id=NO_ID),
        "`parent_id` holds None",
    ),
    (
        "augment",
        {},
        lambda f: f.head(2).with_columns(parent_id=ID, experience_id=NEW),
        "'new' is not the id of one row",
    ),
    ("augment", {}, lambda f: f.head(1).with_columns(parent_id=ID), "fresh id"),
    (
        "augment",
        {},
        lambda f: f.head(1).with_columns(parent_id=ID, quality=1.0),
        "column `quality`, which the given rows do not have",
    ),
    (
        "reshape",
        LINK,
        lambda f: f.select(chosen_id=pl.format("{}!", ID)),
        "not the id of a row that was given",
    ),
    ("reshape", LINK, lambda f: f.select(chosen_id=NO_ID), "`chosen_id` holds None"),
    (
        "reshape",
        LINK,
        Explained(lambda f: f.select(chosen_id="experience_id").head(1), reason=NO_ID),
        "without a reason",
    ),
    ("reshape", LINK, lambda f: f.select("task_id"), "no column `chosen_id`"),
]


@pytest.mark.parametrize(("kind", "declared", "body", "law"), BROKEN)
def test_an_operator_that_breaks_its_law_is_named_with_the_law(
    kind: Any, declared: dict[str, Any], body: Any, law: str
) -> None:
    with pytest.raises(OperatorError, match=law) as caught:
        planted(kind, declared, body).apply(rows(experiences(4, reward=(1.0, 0.0, 0.0, 1.0))))
    assert "operator `planted`" in str(caught.value)


@pytest.mark.parametrize("column", ["run_id", "batch"])
def test_a_new_row_of_an_augment_that_names_a_run_breaks_the_law(column: str) -> None:
    before = rows(experiences(1, reward=1.0, run_id="small", batch=3))
    op = operators.copy_best()
    applied = op.apply(before)
    in_the_run = applied.rows.with_columns(pl.col(column).forward_fill())
    with pytest.raises(OperatorError, match=f"belong to no run, expected `{column}` NULL, got"):
        check(op, before, in_the_run, applied.dropped)


def test_a_group_without_a_name_may_not_be_cut_either() -> None:
    before = rows(experiences(4, reward=(1.0, 0.0))).with_columns(group_id=pl.lit(None, pl.String))
    with pytest.raises(OperatorError, match="cut the group None"):
        planted(*CUT).apply(before)
