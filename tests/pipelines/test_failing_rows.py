"""Rows on which an operator raises keep their error; too many of them, or none left, are told."""

import sys
from typing import Any

import polars as pl
import pytest
from support.builders import experiences, line_of

from rlake.operators import Operator, Rows, group_zscore, keep, operator
from rlake.pipelines import Local, Pipeline, Table
from rlake.store import Store
from rlake.store.errors import ConfigError, OperatorError

EXPERIENCES = Table("experiences")


@pytest.fixture
def hundred(store: Store) -> Store:
    store.append("experiences", experiences(100, reward=(1.0, 0.0)))
    return store


@operator("derive", reads=("rollout_index", "group_id"))
def picky(*, bad: str = "g000") -> Any:
    """Fail on the rows of groups from `bad` on, but for the first of each."""

    def one(row: dict[str, Any]) -> dict[str, Any]:
        if row["rollout_index"] and row["group_id"] >= bad:
            raise ValueError(f"no answer in {row['group_id']}")
        return {"points": float(row["rollout_index"])}

    return Rows(one, {"points": pl.Float64})


def run(store: Store, *operators: Operator, **how: Any) -> Any:
    fields = {k: how.pop(k) for k in ("max_failed", "on_empty", "sink") if k in how}
    pipeline = Pipeline(name="x", source=EXPERIENCES, operators=operators, **fields)
    return pipeline.run(store, executor=Local(part_bytes=800), **how)


def test_rows_that_fail_go_on_with_null_and_their_error_is_stored(hundred: Store) -> None:
    report = run(hundred, picky(bad="g024"))
    assert (report.rows_out, report.rows_failed) == (100, 3)
    assert "picky failed, the last with: ValueError: no answer in g024" in str(report)
    points = report.rows.filter(pl.col("group_id") == "g024")["points"].to_list()
    assert points == [0.0, None, None, None]
    stored = hundred.sql(
        "SELECT experience_id, operator, error, rows_failed FROM operator_errors JOIN lineage "
        "USING (lineage_id) ORDER BY ALL"
    ).fetchall()
    told = ("picky", f"ValueError: no answer in g024 {line_of(__file__, 'no answer in')}", 3)
    assert stored == [(f"g024/0{i}", *told) for i in (1, 2, 3)]


def test_an_operator_that_comes_twice_fails_twice_on_a_row(hundred: Store) -> None:
    run(hundred, picky(bad="g024"), picky(bad="g024"))
    query = "SELECT operator, count(*) FROM operator_errors GROUP BY ALL ORDER BY ALL"
    assert hundred.sql(query).fetchall() == [("picky", 3), ("picky 2", 3)]


def test_too_large_a_share_of_failures_stops_the_job_and_says_so(hundred: Store) -> None:
    with pytest.raises(OperatorError) as caught:
        run(hundred, picky(bad="g000"), sink=Table("experience_values"))
    told = str(caught.value)
    assert told.startswith("operator `picky` (derive): failed on ")
    assert "the last error: ValueError: no answer in g0" in told
    assert hundred.count("lineage") == 0
    assert hundred.count("experience_values") < 25, "it stopped before all rows were treated"
    query = "SELECT count(*) > 0, count(*) < 75, any_value(operator) FROM operator_errors"
    assert hundred.sql(query).fetchall() == [(True, True, "picky")]


@pytest.mark.parametrize(
    ("bad", "share", "stops"),
    [
        ("g024", 0.02, True),
        ("g024", 0.03, False),
        ("g024", 0, True),
        ("z", 0, False),
        ("", 1, False),
    ],
)
def test_the_share_is_of_the_rows_that_the_operator_treated(
    hundred: Store, bad: str, share: float, stops: Any
) -> None:
    if not stops:
        assert run(hundred, picky(bad=bad), max_failed=share).rows_out == 100
        return
    with pytest.raises(OperatorError, match=r"operator `picky`.*failed on"):
        run(hundred, picky(bad=bad), max_failed=share)


def test_one_bad_row_of_few_does_not_stop_a_job(store: Store) -> None:
    store.append("experiences", experiences(2, reward=1.0))
    assert run(store, picky()).rows_failed == 1


def test_a_filter_that_drops_everything_is_warned_of_with_the_numbers(hundred: Store) -> None:
    report = run(hundred, group_zscore(), keep(where="reward > 7"))
    assert report.warnings == ("`keep` dropped all 100 rows (100 for: not true: reward > 7)",)
    assert "warning: `keep` dropped all 100 rows" in str(report)
    with pytest.raises(OperatorError, match="`keep` dropped all 100 rows"):
        run(hundred, keep(where="reward > 7"), on_empty="error")
    assert hundred.count("lineage") == 1


def test_a_filter_that_is_given_nothing_is_no_reason_to_stop(store: Store) -> None:
    assert run(store, keep(where="reward > 7"), on_empty="error").warnings == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_failed: 5", "`max_failed` is a share between 0 and 1, got 5"),
        ("max_failed: some", "`max_failed` must be a share between 0 and 1, got 'some'"),
        ("on_empty: stop", "`on_empty` is `warn` or `error`, got 'stop'"),
        ("executor: locl", "unknown executor `locl`; did you mean `local`"),
        ("executor: {local: {thread: 2}}", "`executor.local` has no key `thread`; did you mean"),
        ("executor: {local: {threads: many}}", "`executor.local.threads` got 'many'"),
        ("executor: [local]", "`executor` is `local`, `ray`, or one of them with settings"),
        ("max_faild: 0.1", "no key `max_faild`; did you mean `max_failed`"),
    ],
)
def test_settings_that_are_wrong_are_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Pipeline.from_yaml(f"name: x\nsource: {{table: tasks}}\n{text}\n")


def test_settings_are_read_from_yaml() -> None:
    text = "name: x\nsource: {table: tasks}\nmax_failed: 0.5\non_empty: error\n"
    pipeline = Pipeline.from_yaml(f"{text}executor: {{local: {{threads: 3, part_bytes: 9}}}}\n")
    assert (pipeline.max_failed, pipeline.on_empty) == (0.5, "error")
    assert pipeline.executor == Local(threads=3, part_bytes=9)


@operator("derive", writes=("points",), scope="row")
def lying(*, how: str) -> Any:
    def body(frame: pl.LazyFrame) -> pl.LazyFrame:
        is_late = pl.col("group_id") > "g010"
        points = pl.lit(1.0).alias("points")
        match how:
            case "ids":
                late = pl.when(is_late).then(pl.lit("other")).otherwise("experience_id")
                return frame.with_columns(points, late.alias("experience_id"))
            case "rows":
                return frame.with_columns(points).filter(~is_late)
            case "columns":
                late = pl.when(is_late).then(0.0).otherwise("reward")
                return frame.with_columns(points, late.alias("reward"))
            case _:
                schema = {**frame.collect_schema(), "points": pl.Float64()}
                return frame.map_batches(
                    lambda rows: rows.with_columns(points=pl.lit("one")),
                    schema=schema,
                    validate_output_schema=False,
                )

    return body


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("ids", "keeps the same ids in the same order"),
        ("rows", "keeps the same ids in the same order"),
        ("columns", "changed the column `reward` without declaring it"),
        ("types", "`points` came out as String, expected Float64"),
    ],
)
def test_a_broken_law_in_a_later_part_names_operator_and_law(
    hundred: Store, how: str, told: str
) -> None:
    with pytest.raises(OperatorError, match=rf"operator `lying` \(derive\).*{told}"):
        run(hundred, lying(how=how))
    assert hundred.count("lineage") == 0


def test_ray_that_is_not_installed_is_told_with_its_extra(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    pipeline = Pipeline(name="x", source=Table("tasks"), executor="ray")
    with pytest.raises(ImportError, match=r"`ray` is not installed.*pip install 'rlake\[ray\]'`$"):
        pipeline.run(store)
