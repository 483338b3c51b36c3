"""Rows on which a body raises: they keep their error, the others go on, and laws still hold."""

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from support.builders import experiences, line_of, rows

from rlake.operators import Batches, Explained, Operator, Rows, Value, operator
from rlake.operators.concurrency import answers
from rlake.operators.row_failures import RowsFailed
from rlake.store.errors import OperatorError

BAD = "g001/02"
FRAME = rows(experiences(12, reward=(0.0, 1.0, 0.5))).with_columns(
    response_text=pl.when(pl.col("experience_id") == BAD)
    .then(pl.lit("seven"))
    .otherwise(pl.col("rollout_index").cast(pl.String))
)
"""Twelve rows in three groups; the text of one is no number."""
GROUPS_APART = FRAME[[0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]]

NUMBER = {"number": pl.Int64}


def _number(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"number": int(row["response_text"])}


async def _number_later(row: Mapping[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return _number(row)


def _numbers(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"number": [int(t) for t in batch["response_text"].to_pylist()]})


@operator("derive")
def by_expression() -> Any:
    return pl.col("response_text").str.to_integer().alias("number")


@operator("derive", writes=("number",))
def by_sql_value() -> Any:
    return Value("response_text::BIGINT")


@operator("derive", writes=("number",), scope="row")
def by_sql_text() -> Any:
    return "SELECT *, response_text::BIGINT AS number FROM input"


@operator("derive", writes=("number",), scope="row")
def by_frame() -> Any:
    return lambda frame: frame.with_columns(number=pl.col("response_text").str.to_integer())


@operator("derive")
def by_batches() -> Any:
    return Batches(_numbers, NUMBER)


@operator("derive")
def by_rows() -> Any:
    return Rows(_number, NUMBER)


@operator("derive")
def by_waiting_rows() -> Any:
    return Rows(_number_later, NUMBER, max_concurrency=3)


FORMS = (by_expression, by_sql_value, by_sql_text, by_frame, by_batches, by_rows, by_waiting_rows)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
@pytest.mark.parametrize("frame", [FRAME, GROUPS_APART], ids=["groups together", "groups apart"])
def test_a_row_on_which_a_body_raises_keeps_its_error_and_the_others_go_on(
    form: Any, frame: pl.DataFrame
) -> None:
    applied = form().apply(frame)
    [(bad, error)] = applied.failed.rows()
    assert bad == BAD
    assert "seven" in error
    assert "\n" not in error
    others = frame.filter(pl.col("experience_id") != BAD)
    assert applied.rows.filter(pl.col("experience_id") != BAD).equals(form().apply(others).rows)
    assert applied.rows["experience_id"].equals(frame["experience_id"])
    assert applied.rows.filter(pl.col("experience_id") == BAD)["number"].to_list() == [None]
    assert applied.dropped.is_empty()


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_pipe_and_split_raise_when_a_row_fails_and_a_limit_says_what_it_allowed(form: Any) -> None:
    for apply in (
        FRAME.pipe,
        lambda op: op.split(FRAME),
        lambda op: FRAME.lazy().pipe(op).collect(),
    ):
        with pytest.raises(Exception, match="seven"):
            apply(form())
    assert form().apply(FRAME, max_failed=1).failed.height == 1
    with pytest.raises(OperatorError, match=r"failed on 1 of 12 rows, more than the 0 allowed"):
        form().apply(FRAME, max_failed=0)


def _raising(kind: Any, *, scope: Any = "row", **declared: Any) -> Any:
    """An operator of a kind that raises on the row whose text is no number."""

    @operator(kind, scope=scope, **declared)
    def raising() -> Any:
        def make(frame: pl.LazyFrame) -> pl.LazyFrame:
            number = pl.col("response_text").str.to_integer()
            match kind:
                case "filter":
                    return frame.filter(number > 0)
                case "augment":
                    parent = pl.col("experience_id").alias("parent_id")
                    own = [pl.lit(None, pl.String).alias(n) for n in ("experience_id", "group_id")]
                    nothing = [pl.lit(None).alias(n) for n in ("run_id", "batch")]
                    copies = frame.filter(number == 0, pl.col("parent_id").is_null()).with_columns(
                        parent
                    )
                    return copies.with_columns(own).with_columns(nothing)
                case "reshape":
                    return frame.filter(number == 1).select(chosen_id="experience_id")
                case "clean":
                    return frame.with_columns(response_text=number.cast(pl.String) + "!")
                case _:
                    return frame.with_columns(priority=number)

        return Explained(make, reason="not above 0") if kind in ("filter", "reshape") else make

    return raising()


@pytest.mark.parametrize("frame", [FRAME, GROUPS_APART], ids=["groups together", "groups apart"])
@pytest.mark.parametrize("scope", ["row", "group"])
@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        ("clean", {"writes": ("response_text",)}),
        ("prioritize", {"writes": ("priority",)}),
        ("filter", {}),
        ("augment", {}),
        ("reshape", {"links": ("chosen_id",)}),
    ],
)
def test_of_every_kind_what_fails_is_apart_and_the_rest_is_as_if_it_had_not_been_there(
    kind: str, declared: dict[str, Any], scope: str, frame: pl.DataFrame
) -> None:
    op = _raising(kind, scope=scope, **declared)
    applied = op.apply(frame)
    failed = applied.failed["experience_id"].to_list()
    assert failed == ([BAD] if scope == "row" else [f"g001/0{i}" for i in range(4)])
    is_failed = pl.col("experience_id").is_in(failed)
    without = op.apply(frame.filter(~is_failed))
    told = dict(applied.dropped.iter_rows())
    if kind in ("filter", "reshape"):
        assert all("seven" in told.pop(i) for i in failed)
        assert applied.rows.equals(without.rows)
    else:
        assert applied.rows.head(12)["experience_id"].equals(frame["experience_id"])
        assert applied.rows.filter(~is_failed).equals(without.rows)
    assert told == dict(without.dropped.iter_rows())
    if kind == "clean":
        assert applied.rows.filter(is_failed).equals(frame.filter(is_failed))
    if kind == "prioritize":
        assert set(applied.rows.filter(is_failed)["priority"]) == {None}


@pytest.mark.parametrize("kind", ["clean", "filter", "augment", "reshape", "prioritize"])
def test_rows_that_fail_within_a_body_that_goes_on_are_treated_alike(kind: Any) -> None:
    def judge(row: Mapping[str, Any]) -> dict[str, Any]:
        number = int(row["response_text"])
        match kind:
            case "filter":
                return {"keep": number > 0}
            case "clean":
                return {"response_text": f"{number}!"}
            case "prioritize":
                return {"priority": float(number)}
            case "reshape":
                return {"chosen_id": row["experience_id"]}
            case _:
                new = f"{row['experience_id']}/new"
                return {"parent_id": row["experience_id"], "experience_id": new, "priority": 1.0}

    types = {
        "filter": {"keep": pl.Boolean},
        "clean": {"response_text": pl.String},
        "prioritize": {"priority": pl.Float64},
        "reshape": {"chosen_id": pl.String},
        "augment": {"parent_id": pl.String, "experience_id": pl.String, "priority": pl.Float64},
    }

    @operator(kind, links=("chosen_id",) if kind == "reshape" else ())
    def waits() -> Any:
        return Rows(judge, types[kind])

    applied = waits().apply(FRAME)
    assert applied.failed["experience_id"].to_list() == [BAD]
    assert "seven" in applied.failed["error"][0]
    if kind == "filter":
        assert applied.rows["experience_id"].to_list() == [
            f"g00{g}/0{i}" for g in range(3) for i in range(1, 4) if (g, i) != (1, 2)
        ]
    if kind in ("filter", "reshape"):
        assert "seven" in dict(applied.dropped.iter_rows())[BAD]
    if kind == "clean":
        assert applied.rows["response_text"].to_list()[5:8] == ["1!", "seven", "3!"]
    if kind == "prioritize":
        assert applied.rows["priority"].to_list()[5:8] == [1.0, None, 3.0]
    if kind in ("reshape", "augment"):
        assert applied.rows.height == {"reshape": 11, "augment": 12 + 11}[kind]


@pytest.mark.parametrize("seconds", [5.0, 0.05])
def test_what_a_row_function_answers_wrongly_is_the_error_of_that_row(seconds: float) -> None:
    async def judge(row: Mapping[str, Any]) -> Any:
        match row["rollout_index"], row["group_id"]:
            case 0, "g000":
                return {"score": "high", "why": "x"}
            case 1, "g000":
                return {"score": 1.0}
            case 2, "g000":
                return None
            case 3, "g000":
                raise asyncio.CancelledError("given up by the client")
            case 0, "g001":
                await asyncio.sleep(30 if seconds < 1 else 0)
        return {"score": 1, "why": None}

    @operator("derive")
    def judged() -> Any:
        return Rows(judge, {"score": pl.Float64, "why": pl.String}, timeout=seconds)

    async def inside_a_running_loop() -> Any:
        return judged().apply(FRAME)

    applied = asyncio.run(inside_a_running_loop())
    late = ["TimeoutError: it took longer than 0.05 s"] if seconds < 1 else []
    assert applied.failed["error"].to_list() == [
        "TypeError: `score` must be Float64, got 'high'",
        "the row function returned ['score'], expected exactly ['score', 'why']",
        "the row function returned NoneType, expected exactly ['score', 'why']",
        f"CancelledError: given up by the client {line_of(__file__, 'given up by')}",
        *late,
    ]
    first = 4 + len(late)
    assert applied.rows["score"].to_list() == [None] * first + [1.0] * (12 - first)
    assert applied.rows["why"].null_count() == 12


def test_no_more_calls_are_under_way_and_no_more_rows_are_taken_than_at_once() -> None:
    taken, under_way, most = 0, 0, 0

    def given() -> Any:
        nonlocal taken
        for i in range(50):
            taken += 1
            yield i

    async def slow(i: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        assert taken - i <= 4
        await asyncio.sleep(0.001)
        under_way -= 1
        return i

    assert answers(slow, given(), max_concurrency=4) == [(i, None) for i in range(50)]
    assert most == 4


def test_a_row_function_needs_room_and_time() -> None:
    wrong: dict[str, Any]
    for wrong in ({"max_concurrency": 0}, {"timeout": 0.0}, {"timeout": float("nan")}):
        with pytest.raises(OperatorError, match="must be above 0"):
            Rows(_number, NUMBER, **wrong)


@operator("derive", writes=("number",), scope="row")
def loses_a_row() -> Any:
    return lambda frame: frame.filter(pl.col("response_text") != "3").with_columns(
        number=pl.col("response_text").str.to_integer()
    )


@operator("prioritize", scope="row")
def below_zero() -> Any:
    return (pl.col("response_text").str.to_integer() - 1).alias("priority")


@operator("derive")
def wrong_batches() -> Any:
    return Batches(lambda batch: pa.record_batch({"number": ["x"] * batch.num_rows}), NUMBER)


@operator("derive")
def no_batches() -> Any:
    return Batches(lambda batch: batch.num_rows, NUMBER)  # pyright: ignore[reportArgumentType, reportReturnType]


@pytest.mark.parametrize(
    ("planted", "law"),
    [
        (loses_a_row, "same ids in the same order"),
        (below_zero, "finite and not negative"),
        (wrong_batches, "columns of .*expected"),
        (no_batches, "returned a int, expected a pyarrow.RecordBatch"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_broken_law_is_never_taken_for_the_failure_of_a_row(planted: Any, law: str) -> None:
    with pytest.raises(OperatorError, match=law) as caught:
        planted().apply(FRAME)
    assert not isinstance(caught.value, RowsFailed)


def test_an_error_that_comes_whatever_the_rows_are_is_raised_at_once() -> None:
    calls = []

    @operator("derive", writes=("number",), scope="row")
    def broken() -> Any:
        def make(frame: pl.LazyFrame) -> pl.LazyFrame:
            calls.append(1)
            return frame.with_columns(number=pl.col("no_such_column"))

        return make

    with pytest.raises(OperatorError, match="no_such_column"):
        broken().apply(FRAME)
    assert len(calls) <= 2
    with pytest.raises(OperatorError, match="no_such"):
        by_value("no_such_function(reward)").apply(FRAME)


def by_value(sql: str) -> Operator:
    @operator("derive", writes=("value",))
    def value() -> Any:
        return Value(sql)

    return value()


def test_lists_that_make_as_many_values_as_rows_are_not_taken_for_one_value_a_row() -> None:
    frame = pl.DataFrame({"experience_id": ["a", "b"], "x": [[1, 2], []]})
    with pytest.raises(OperatorError, match="expected one a row"):
        by_value("unnest(x)")(frame)


def test_of_what_looks_at_all_rows_or_at_groups_that_are_not_there_nothing_is_cut() -> None:
    with pytest.raises(RowsFailed, match="seven"):
        _raising("filter", scope="all").apply(FRAME)
    with pytest.raises(RowsFailed, match="seven"):
        _raising("filter", scope="group").apply(FRAME.drop("group_id"))
    again = pickle.loads(pickle.dumps(RowsFailed("operator `x`: failed", "ValueError: no")))
    assert (str(again), again.reason) == ("operator `x`: failed", "ValueError: no")


def test_rows_without_a_group_are_one_group_when_groups_are_cut() -> None:
    no_group = pl.col("group_id").replace({"g001": None})
    applied = _raising("filter", scope="group").apply(FRAME.with_columns(no_group))
    assert applied.failed["experience_id"].to_list() == [f"g001/0{i}" for i in range(4)]


def test_a_copy_made_before_is_not_made_again_when_rows_are_cut() -> None:
    op = _raising("augment")
    once = op.apply(FRAME)
    twice = op.apply(once.rows)
    assert twice.rows.equals(once.rows)
    assert twice.failed.equals(once.failed)


def test_rows_that_are_there_twice_cannot_be_cut() -> None:
    with pytest.raises(OperatorError, match="is there more than once"):
        by_expression().apply(pl.concat([FRAME, FRAME]))


def test_a_filter_refuses_rows_that_have_the_columns_it_marks() -> None:
    with pytest.raises(OperatorError, match="marks rows in a column `reason` of its own"):
        _raising("filter").apply(FRAME.with_columns(reason=pl.lit("x")))


def test_sql_that_returns_rows_in_another_order_is_put_into_the_order_of_the_rows() -> None:
    @operator("derive", writes=("mean",), scope="group")
    def by_window() -> Any:
        return (
            "SELECT *, avg(reward) OVER (PARTITION BY group_id) AS mean FROM input "
            "ORDER BY rollout_index DESC, group_id"
        )

    made = by_window()(GROUPS_APART)
    assert made["experience_id"].equals(GROUPS_APART["experience_id"])
    assert by_window()(GROUPS_APART.lazy()).collect().equals(made)
