"""Rows that do not fit are refused, with the column, what was got, and the way out."""

import math
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from rlake.store import Experience, Store
from rlake.store.errors import SchemaError
from rlake.store.records import rows_of
from rlake.store.schema import TABLES
from rlake.store.validate import check

ROW = {
    "experience_id": "e",
    "task_id": "t",
    "group_id": "g",
    "rollout_index": 0,
    "source": "explorer",
}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rewrad": 1.0}, "column `rewrad` is not a column of `experiences`; did you mean `reward`?"),
    ({"task_id": None}, "column `task_id` of `experiences` is NULL in 1 of 1 rows"),
    (
        {"reward": "1.0"},
        "column `reward` of `experiences` must be double, got '1.0' (str) in row 0",
    ),
    ({"reward": b"1"}, "must be double, got b'1' (bytes) in row 0"),
    ({"task_id": 3}, "column `task_id` of `experiences` must be string, got 3 (int) in row 0"),
    (
        {"rollout_index": 1.5},
        "column `rollout_index` of `experiences` must be int64, got 1.5 (float) in row 0",
    ),
    ({"rollout_index": True}, "must be int64, got True (bool) in row 0"),
    ({"rollout_index": "1"}, "must be int64, got '1' (str) in row 0"),
    ({"rollout_index": 2**70}, "column `rollout_index` of `experiences` must be int64"),
    ({"token_ids": [1, 2.5]}, "column `token_ids` of `experiences` must be list<item: int32>"),
    ({"token_ids": ["1"]}, "must be list<item: int32>, got ['1'] (list) in row 0"),
    ({"token_ids": [2**40]}, "must be list<item: int32>"),
    ({"token_ids": 5}, "must be list<item: int32>, got 5 (int) in row 0"),
    ({"token_ids": [1, None]}, "column `token_ids` of `experiences` holds NULL among its values"),
    ({"token_ids": [1], "logprobs": [None]}, "`logprobs` of `experiences` holds NULL among"),
    ({"token_ids": [1], "loss_mask": [1]}, "`loss_mask` of `experiences` must be list<item: bool>"),
    ({"token_ids": [1, 2], "logprobs": [0.0]}, "`logprobs` of `experiences` has 1 values in row 0"),
    ({"token_ids": [1], "loss_mask": []}, "`loss_mask` of `experiences` has 0 values in row 0"),
    ({"token_rewards": [0.0]}, "`token_rewards` of `experiences` has 1 values in row 0"),
    (
        {"token_ids": [1], "teacher_logprobs": [0.0, 0.0]},
        "`teacher_logprobs` of `experiences` has 2",
    ),
    ({"token_ids": [1], "num_tokens": 5}, "`num_tokens` of `experiences` is 5 in row 0"),
    ({"reward": math.nan}, "column `reward` of `experiences` holds NaN or infinity in row 0"),
    ({"priority": math.inf}, "column `priority` of `experiences` holds NaN or infinity"),
    ({"token_ids": [1], "logprobs": [-math.inf]}, "`logprobs` of `experiences` holds NaN"),
    ({"rewards": [{"name": "a", "value": math.nan}]}, "`rewards` of `experiences` holds NaN"),
    ({"rewards": [{"name": "a", "valu": 1.0}]}, "unknown field `valu`"),
    ({"rewards": {"a": 1.0}}, "column `rewards` of `experiences` must be list<item: struct<"),
    ({"source": "explorr"}, "holds 'explorr'; did you mean `explorer`?"),
    ({"purpose": "evel"}, "holds 'evel'; did you mean `eval`?"),
    ({"priority": -1.0}, "`priority` of `experiences` holds a negative number, expected 0 or more"),
    ({"created_at": "2020-01-01"}, "column `created_at` of `experiences` must be timestamp"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[str(v)[:40] for v, _ in REFUSED])
def test_a_row_that_does_not_fit_is_refused(
    store: Store, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(SchemaError) as refused:
        store.append("experiences", [ROW | values])
    assert message in str(refused.value)
    assert store.count("experiences") == 0


REFUSED_COLUMNS: list[tuple[dict[str, pa.Array], str]] = [
    ({"reward": pa.array(["1.0"])}, "must be double, got string; cast it first"),
    ({"messages": pa.array([1])}, "must be string, got int64; cast it first"),
    ({"token_ids": pa.array([["1"]])}, "must be list<item: int32>, got list<item: string>"),
    ({"token_ids": pa.array([[1.5]])}, "must be list<item: int32>, got list<item: double>"),
    ({"num_turns": pa.array([True])}, "must be int64, got bool"),
    ({"token_ids": pa.array([[1]]), "loss_mask": pa.array([[2]])}, "must be list<item: bool>"),
    ({"rewards": pa.array([[{"name": "a", "value": "1"}]])}, "must be list<item: struct<"),
    ({"token_ids": pa.array([[1]]), "logprobs": pa.array([[1e300]])}, "holds NaN or infinity"),
    ({"prompt_text": pa.array([b"x"])}, "must be string, got binary"),
]


@pytest.mark.parametrize(
    ("columns", "message"), REFUSED_COLUMNS, ids=[str(list(c)) + m[:30] for c, m in REFUSED_COLUMNS]
)
def test_a_column_that_does_not_fit_is_refused(
    store: Store, columns: dict[str, pa.Array], message: str
) -> None:
    with pytest.raises(SchemaError) as refused:
        store.append("experiences", pa.table({k: [v] for k, v in ROW.items()} | columns))
    assert message in str(refused.value)


def test_a_missing_column_is_named(store: Store) -> None:
    row = {k: v for k, v in ROW.items() if k != "source"}
    with pytest.raises(SchemaError, match="column `source` of `experiences` is missing"):
        store.append("experiences", [row])


def test_the_row_that_is_wrong_is_named(store: Store) -> None:
    made = [ROW | {"experience_id": str(i), "reward": 1.0} for i in range(5)]
    with pytest.raises(SchemaError, match=r"got 'good' \(str\) in row 3"):
        store.append("experiences", [*made[:3], made[3] | {"reward": "good"}, made[4]])


def test_a_long_wrong_value_is_not_printed_whole(store: Store) -> None:
    with pytest.raises(SchemaError) as refused:
        store.append("experiences", [ROW | {"rollout_index": "x" * 10_000}])
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("row", [3, "row", None])
def test_what_is_no_row_is_refused(store: Store, row: Any) -> None:
    with pytest.raises(SchemaError, match="must be a mapping or a record, got "):
        store.append("experiences", [row])


ACCEPTED: list[tuple[str, Any, Any]] = [
    ("reward", 1, 1.0),
    ("reward", True, 1.0),
    ("reward", np.float32(0.5), 0.5),
    ("rollout_index", 2.0, 2),
    ("rollout_index", np.int32(2), 2),
    ("token_ids", np.array([1, 2]), [1, 2]),
    ("token_ids", (1, 2), [1, 2]),
    ("rewards", [{"value": 1, "name": "a"}], [{"name": "a", "value": 1.0}]),
    ("segments", [{"policy_version": 1}], [{"policy_version": 1, "num_tokens": None}]),
]


@pytest.mark.parametrize(("name", "value", "stored"), ACCEPTED, ids=str)
def test_what_means_the_same_is_taken(store: Store, name: str, value: Any, stored: Any) -> None:
    store.append("experiences", [ROW | {name: value}])
    assert store.scan("experiences").select(name).collect().to_dicts() == [{name: stored}]


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["explorer"]), pl.String])
def test_text_may_be_categorical(store: Store, kind: Any) -> None:
    store.append("experiences", pl.DataFrame([ROW]).with_columns(pl.col("source").cast(kind)))
    assert store.scan("experiences").select("source").collect().item() == "explorer"


def test_large_lists_and_views_of_polars_are_taken(store: Store) -> None:
    frame = pl.DataFrame([ROW | {"token_ids": [1, 2], "logprobs": [0.0, -1.0]}])
    store.append("experiences", frame)
    assert store.scan("experiences").select("token_ids").collect().item().to_list() == [1, 2]


def test_a_row_trains_unless_it_says_that_it_evaluates(store: Store) -> None:
    store.append("experiences", [ROW, ROW | {"experience_id": "other", "purpose": "eval"}])
    assert sorted(store.scan("experiences").collect()["purpose"]) == ["eval", "train"]


def test_records_have_the_columns_of_their_rows() -> None:
    kept = {**ROW, "rollout_index": 1}
    records = [
        Experience(**kept),
        Experience(
            **kept,
            token_ids=np.array([1, 2]),  # type: ignore[arg-type]
            loss_mask=[False, True],
            messages=[{"role": "user", "content": "ä"}],
            rewards={"a": 1.0, "b": None},
            timings={"total": 0.5},
            segments=[{"policy_version": 3, "num_tokens": 1}],
            sampling={"min_tokens": 2},
        ),
    ]
    made = check(TABLES["experiences"], records)
    assert made.equals(check(TABLES["experiences"], rows_of(records)))
    assert made.column("num_tokens").to_pylist() == [None, 2]
    with pytest.raises(SchemaError, match="an experience has no `experience_id` or `group_id`"):
        check(TABLES["experiences"], [records[0].updated(group_id=None)])
    misspelled = records[0].updated(rewrad=1.0)
    for given in ([records[0], misspelled], [misspelled, records[0]]):
        with pytest.raises(SchemaError, match="did you mean `reward`"):
            check(TABLES["experiences"], given)
