"""What `@operator` makes of a function: parameters, bodies, names, fingerprints."""

from dataclasses import replace
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from support.builders import RIGHT_AND_WRONG, experiences, rows

from rlake.operators import (
    Batches,
    Explained,
    Value,
    drop_flat_groups,
    group_zscore,
    keep,
    operator,
    pairs,
    resolve,
)
from rlake.store.errors import OperatorError

FOUR = rows(experiences(4, reward=RIGHT_AND_WRONG))


@operator("filter")
def short(*, limit: int = 3) -> pl.Expr:
    return pl.col("response_text").str.len_chars() <= limit


@operator("filter")
def right_by_sql() -> str:
    return "SELECT * FROM input WHERE reward = 1 ORDER BY experience_id DESC"


@operator("filter")
def right_by_marks() -> Any:
    return lambda frame: frame.with_columns(
        keep=pl.col("reward") == 1, reason=pl.format("reward was {}", "reward")
    )


@operator("filter")
def right_by_value() -> Value:
    return Value("reward = 1")


@operator("filter")
def right_by_batches() -> Batches:
    def judge(batch: pa.RecordBatch) -> pa.RecordBatch:
        kept = [value == 1 for value in batch.column("reward").to_pylist()]
        return pa.record_batch({"keep": kept, "reason": [f"of {batch.num_rows}"] * len(kept)})

    return Batches(judge, columns={"keep": pl.Boolean, "reason": pl.String})


@pytest.mark.parametrize("form", [right_by_sql, right_by_marks, right_by_value, right_by_batches])
def test_a_filter_may_be_written_in_every_form(form: Any) -> None:
    kept, dropped = form().split(FOUR)
    assert kept["experience_id"].sort().to_list() == ["g000/00", "g000/03"]
    assert dropped["experience_id"].to_list() == ["g000/01", "g000/02"]
    assert kept.columns == FOUR.columns


@operator("filter")
def right_by_expression() -> Explained:
    return Explained(pl.col("reward") > 0, reason=pl.format("{} is wrong", "response_text"))


def test_the_reason_of_a_drop_comes_from_the_row_or_from_the_operator() -> None:
    told = {
        form.name: form().split(FOUR)[1]["reason"][0]
        for form in (right_by_marks, right_by_batches, right_by_value, right_by_expression, short)
    }
    assert told == {
        "right_by_marks": "reward was 0.0",
        "right_by_batches": "of 4",
        "right_by_value": "keep is false: reward = 1",
        "right_by_expression": "no idea is wrong",
        "short": 'keep is false: [(col("response_text").str.len_chars()) <= (dyn int: 3)]',
    }


def test_a_filter_drops_rows_for_which_it_cannot_tell() -> None:
    frame = rows(experiences(3, reward=(1.0, None, 0.0)))
    kept, dropped = keep(where="reward > 0").split(frame)
    assert (kept.height, dropped["reason"].to_list()) == (1, ["not true: reward > 0"] * 2)


def test_a_derive_by_batches_sees_bounded_batches_in_order() -> None:
    sizes = []

    @operator("derive")
    def numbered() -> Batches:
        def count(batch: pa.RecordBatch) -> pa.RecordBatch:
            sizes.append(batch.num_rows)
            return pa.record_batch({"place": batch.column("rollout_index")})

        return Batches(count, columns={"place": pl.Int64})

    frame = rows(experiences(2500, reward=0.0, group_size=2500))
    assert numbered()(frame)["place"].to_list() == list(range(2500))
    assert sizes == [1024, 1024, 452]


def test_sql_of_an_operator_reaches_no_file(tmp_path: Any) -> None:
    (tmp_path / "secret.csv").write_text("experience_id\n1\n")

    @operator("filter")
    def thief() -> str:
        return f"SELECT * FROM '{tmp_path / 'secret.csv'}'"

    with pytest.raises(OperatorError, match="operator `thief`"):
        thief()(FOUR)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("avg(reward) OVER (PARTITION BY group_id)", [0.5, 0.0, 0.5, 0.0, 0.5]),
        ("(reward IN (SELECT max(reward) FROM input))::INT", [1, 0, 0, 0, 0]),
    ],
)
def test_an_sql_value_belongs_to_its_row_though_windows_and_joins_change_the_order(
    value: str, expected: list[float]
) -> None:
    made = rows(experiences(5)).with_columns(
        group_id=pl.Series(["g2", "g1", "g2", "g1", "g2"]),
        reward=pl.Series([1.0, 0.0, 0.25, 0.0, 0.25]),
    )

    @operator("derive", writes=("value",))
    def told() -> Value:
        return Value(value)

    parts = pl.concat([made[:2], made[2:]], rechunk=False)
    assert told()(parts)["value"].to_list() == expected


def test_an_sql_value_must_give_one_value_a_row() -> None:
    with pytest.raises(OperatorError, match=r"gives 1 values for 4 rows"):
        keep(where="max(reward) = 1")(FOUR)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            {"drop_flat_groups": {"min_sdt": 0.1}},
            "has no parameter `min_sdt`; did you mean `min_std`?",
        ),
        ({"drop_flat_groups": {"min_std": "much"}}, r"`min_std` of `drop_flat_groups` got 'much'"),
        ({"drop_flat_groups": {"min_std": True}}, r"`min_std` of `drop_flat_groups` got True"),
        ({"drop_flat_groups": {"min_std": float("nan")}}, "finite number"),
        ({"pairs": {"strategy": "best"}}, "'max_min', 'best_against_rest', 'all' or "),
        ({"leave_one_out": {"x": 1}}, "`leave_one_out` has no parameter `x`; it has no parameters"),
        ("keep", "missing a required .*argument: 'where'"),
        ({"keep": {"where": "reward >"}}, "operator `keep`: `where` 'reward >' does not parse"),
        ("group_zcore", "unknown operator `group_zcore`; did you mean `group_zscore`?"),
        ({"best_of_n": {"n": 1}}, "unknown operator `best_of_n`; it is called `top_k`"),
        ("thought", "unknown operator `thought`; it is called `extract_reasoning`"),
        ({"keep": {"where": "true"}, "pairs": {}}, "an operator is `name` or"),
        ({"pairs": ["max_min"]}, "must be `parameter: value`"),
        ("json:dumps", "is not an operator"),
        ("json:dump_all", "module `json` has no `dump_all`"),
        ("no.such.module:x", "cannot be imported"),
    ],
)
def test_a_name_or_parameter_that_does_not_fit_is_told(spec: Any, told: str) -> None:
    with pytest.raises(OperatorError, match=told):
        resolve(spec)


def test_an_operator_is_found_by_name_with_parameters_or_by_import_path() -> None:
    assert resolve("drop_flat_groups") == drop_flat_groups()
    assert resolve({"drop_flat_groups": {"min_std": 1}}).params == {"min_std": 1.0}
    assert resolve({"drop_flat_groups": None}) == drop_flat_groups(min_std=0.0)
    assert resolve("rlake.operators.advantage.group:group_zscore") == group_zscore()


def test_the_fingerprint_follows_function_version_and_parameters_and_nothing_else() -> None:
    assert short(limit=3).fingerprint == short().fingerprint
    assert short(limit=4).fingerprint != short().fingerprint
    assert replace(short(), version=2).fingerprint != short().fingerprint
    assert replace(short(), whole_groups=True).fingerprint == short().fingerprint
    assert keep(where="reward > 0").fingerprint == "06a876684a1b9951ac3f"


def test_columns_read_and_written_are_known_without_running() -> None:
    op = group_zscore()
    assert (set(op.reads), op.reads_all, op.writes) == (
        {"reward", "group_id"},
        False,
        ("advantage",),
    )
    assert keep(where="reward > 0 AND len(response_text) < 9").reads == ("response_text", "reward")
    texts = ("messages", "response_text")
    assert pairs().reads == ("experience_id", "task_id", "group_id", "reward", *texts)


def test_a_missing_column_is_told_with_the_nearest_one() -> None:
    with pytest.raises(OperatorError, match=r"reads column `reward`.*did you mean `rewards`\?"):
        group_zscore()(FOUR.drop("reward").lazy())


def test_a_frame_without_ids_is_refused() -> None:
    with pytest.raises(OperatorError, match="neither `experience_id` nor `task_id`"):
        short()(pl.DataFrame({"response_text": ["a"]}))


def raises(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise LookupError("no judge")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda frame: frame.collect(), "returned a DataFrame, expected a LazyFrame"),
        (Batches(raises, {"quality": pl.Float64}), r"operator `broken` .*LookupError: no judge"),
        (
            Batches(lambda b: b.slice(1).select(["reward"]), {"reward": pl.Float64}),
            "returned 3 rows",
        ),
    ],
)
def test_what_a_body_does_wrong_is_told_with_the_name_of_the_operator(
    body: Any, message: str
) -> None:
    @operator("derive")
    def broken() -> Any:
        return body

    with pytest.raises(OperatorError, match=message):
        broken()(FOUR)


def test_tasks_are_identified_by_their_own_id() -> None:
    tasks = pl.DataFrame({"task_id": ["a", "b"], "answer": ["1", None]})
    kept, dropped = keep(where="answer IS NOT NULL").split(tasks)
    assert kept["task_id"].to_list() == ["a"]
    assert dropped.select("task_id", "reason").rows() == [("b", "not true: answer IS NOT NULL")]


def test_an_unknown_kind_is_told() -> None:
    with pytest.raises(OperatorError, match="unknown kind `filer`; did you mean `filter`"):
        operator("filer")  # pyright: ignore[reportArgumentType]
