"""`expect:` of pipelines: each kind finds its rows, and an error lets nothing be written."""

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.builders import experiences, rows, task

from rlake.pipelines import Expectation, File, Pipeline, Sql, Table
from rlake.pipelines.expectations import Checked, bind, build, check
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError

NOW = datetime.now(UTC)
FRAME = pl.DataFrame(
    {
        "experience_id": ["a", "b", "c", "d", "e"],
        "group_id": ["g", "g", "g", "h", "h"],
        "reward": [0.0, None, 1.5, float("nan"), 1.0],
        "word": ["x", "x", "y", None, "it's"],
        "at": [NOW - timedelta(hours=h) for h in (9, 8, 7, 6, 5)],
    }
)
FAILING: list[tuple[dict[str, Any], list[str]]] = [
    ({"not_null": "reward"}, ["b"]),
    ({"not_null": ["word", "reward"]}, ["b", "d"]),
    ({"unique": "word"}, ["a", "b"]),
    ({"unique": ["group_id", "word"]}, ["a", "b"]),
    ({"accepted_values": {"word": ["x", "it's"]}}, ["c"]),
    ({"accepted_values": {"word": ["x"], "group_id": ["g"]}}, ["c", "d", "e"]),
    ({"range": {"reward": [0, 1]}}, ["c", "d"]),
    ({"range": {"reward": [0.5, None]}}, ["a", "d"]),
    ({"range": {"reward": [0, 1]}, "where": "group_id = 'g'"}, ["c"]),
    ({"group_size": [3, None]}, ["d", "e"]),
    ({"group_size": [None, 2]}, ["a", "b", "c"]),
    ({"sql": "SELECT * FROM rows WHERE reward > 1 AND NOT isnan(reward);"}, ["c"]),
    ({"sql": "WITH t AS (SELECT word FROM rows) SELECT word, 1 FROM t WHERE word = 'y'"}, ["y"]),
]
PASSING: list[dict[str, Any]] = [
    {"not_null": "experience_id"},
    {"unique": "experience_id"},
    {"range": {"reward": [-1, 2]}, "where": "NOT isnan(reward)"},
    {"accepted_values": {"word": ["x", "y", "it's"]}},
    {"freshness": {"at": "6h"}},
    {"group_size": [2, 3]},
    {"row_count": {"min": 5, "max": 5, "change": 0.0}},
    {"sql": "SELECT 1 FROM rows WHERE group_id = 'none'"},
]
SCORED = "SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id)"
COUNTS: list[dict[str, Any]] = [
    {"freshness": {"at": "4h"}},
    {"freshness": {"at": "4h"}, "where": "false"},
    {"row_count": {"min": 6}},
    {"row_count": {"max": 4}},
]


def checked(store: Store, given: dict[str, Any], frame: pl.DataFrame = FRAME) -> Checked:
    [found] = check(store, [Expectation.model_validate(given)], "five rows", rows=frame)
    return found


def test_each_kind_finds_the_rows_that_fail_and_passes_others(store: Store) -> None:
    for given, ids in FAILING:
        found = checked(store, given)
        assert (list(found.row_ids), found.num_failing) == (ids, len(ids)), given
    for given in PASSING:
        assert checked(store, given).passed, given
    for given in COUNTS:
        found = checked(store, given)
        assert (found.num_failing, found.row_ids) == (1, ()), given
    told = store.sql(
        "SELECT count(*), count(*) FILTER (passed), max(len(row_ids)), min(num_rows), "
        "count(DISTINCT expectation_id) FROM expectations"
    ).fetchall()
    number = len(FAILING) + len(PASSING) + len(COUNTS)
    assert told == [(number, len(PASSING), 3, 5, number)]


def test_ranges_and_duplicates_agree_with_python_on_random_rows(store: Store) -> None:
    random.seed(0)
    values = [random.choice([None, float("nan"), random.gauss(0, 1)]) for _ in range(300)]
    words = [random.choice("abcdefghijklmnopqrstuvwxyz") * random.randint(1, 9) for _ in values]
    frame = pl.DataFrame({"run_id": map(str, range(300)), "v": values, "w": words})
    wrong = [v for v in values if v is not None and not -1 <= v <= 1]
    assert checked(store, {"range": {"v": [-1, 1]}}, frame).num_failing == len(wrong)
    twice = [w for w in words if words.count(w) > 1]
    assert checked(store, {"unique": "w"}, frame).num_failing == len(twice)


def test_a_row_count_is_compared_with_the_last_that_passed(store: Store) -> None:
    half = {"row_count": {"change": 0.5}}
    assert checked(store, half).passed
    assert not checked(store, half, FRAME.head(2)).passed
    assert not checked(store, half, FRAME.head(2)).passed, "a failure is no measure"
    assert checked(store, half, FRAME.head(3)).passed
    assert checked(store, half, FRAME.head(2)).passed


def test_a_row_count_with_a_condition_is_compared_with_rows_of_that_condition(store: Store) -> None:
    some = {"row_count": {"change": 0.1}, "where": "reward > 0.5"}
    assert checked(store, some).passed
    assert checked(store, some).passed, "nothing changed"


def test_values_are_compared_as_they_are_written(store: Store) -> None:
    large = pl.DataFrame({"x": [2**53 + 1]})
    assert checked(store, {"accepted_values": {"x": [2**53 + 1]}}, large).passed
    assert not checked(store, {"accepted_values": {"x": [2**53]}}, large).passed
    assert checked(store, {"range": {"x": [0, float("inf")]}}, large).passed


def test_a_select_may_name_its_columns_as_it_likes(store: Store) -> None:
    found = checked(store, {"sql": "SELECT reward AS num_rows, 1 AS num_failing FROM rows"})
    assert found.num_failing == FRAME.height


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"not_nul": "reward"}, "has no key `not_nul`; did you mean `not_null`"),
        ({}, "an expectation is one of .*, got none"),
        ({"unique": "a", "not_null": "b"}, "got `not_null` and `unique`"),
        ({"freshness": {"at": "soon"}}, "a number and a unit, such as 30m"),
        ({"sql": "SELECT 1", "where": "true"}, "`where` is not for `sql`"),
        ({"range": {"reward": 1}}, r"expect\.sink\.0\.range\.reward`: .*tuple"),
        ({"not_null": "a", "severity": "fatal"}, "'warn' or 'error'"),
        ({"not_null": []}, "expected one column or more"),
        ({"range": {"reward": [1, 0]}}, "the least and the largest value, got 1.0, 0.0"),
        ({"range": {"reward": [float("nan"), None]}}, "the least and the largest value"),
        ({"group_size": [2, 3.5]}, "integer"),
        ("reward", "`expect.sink.0`"),
    ],
)
def test_what_is_no_expectation_is_refused_with_its_place(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build([given], "expect.sink")


@pytest.mark.parametrize(
    "given",
    [
        {"not_null": "rewrad"},
        {"range": {"word": [0, 1]}, "where": "rewrad > 1"},
        {"sql": "SELECT rewrad FROM rows"},
        {"sql": "DELETE FROM rows"},
        {"sql": "SELECT 1; SELECT 2"},
    ],
)
def test_unknown_columns_and_other_statements_are_refused_before_any_work(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"`expect\.source`: "):
        bind(build([given], "x"), FRAME.schema, "expect.source")


def counts(store: Store) -> dict[str, int]:
    return {name: store.count(name) for name in ("drops", "lineage", "scores")}


@pytest.mark.parametrize("kind", ["file", "table"])
def test_an_output_that_is_not_as_expected_is_not_written_at_all(
    store: Store, tmp_path: Path, kind: str
) -> None:
    store.append("tasks", [task(i) for i in range(3)])
    store.append("experiences", experiences(12, reward=[1.0, 5.0, 2.0, 10.0]))
    score = {"score": {"reward": "exact_match"}}
    sink = File(str(tmp_path / "out.jsonl")) if kind == "file" else Table("scores")
    given = build([{"range": {"rollout_index": [0, 1]}, "name": "small"}], "x")
    operators: Any = [] if kind == "file" else [score]
    failing = Pipeline(
        name="clean",
        source=Sql(f"{SCORED} WHERE e.reward < 9"),
        operators=operators,
        sink=sink,
        expect={"sink": given},
    )
    before = counts(store)
    with pytest.raises(JobError) as error:
        failing.run(store)
    assert (
        "`small` fails for the output of pipeline `clean`: 3 of 9 rows, such as `g000/02`, "
        in str(error.value)
    )
    assert "nothing was written: fix the rows, or set `severity: warn`" in str(error.value)
    assert counts(store) == before
    assert list(tmp_path.glob("out*")) == []
    [row] = store.scan("expectations").collect().to_dicts()
    assert (row["passed"], row["num_failing"], row["row_ids"]) == (
        False,
        3,
        ["g000/02", "g001/02", "g002/02"],
    )
    assert row["lineage_id"]
    warned = Pipeline(**{**vars(failing), "expect": {"sink": (_warn(given[0]),)}}).run(store)
    assert warned.rows_out == 9
    assert [w for w in warned.warnings if "`small` fails" in w]


def _warn(one: Expectation) -> Expectation:
    return one.model_copy(update={"severity": "warn"})


@pytest.mark.parametrize("kind", ["table", "sql", "file", "frame"])
def test_a_source_of_any_kind_is_checked_whole_before_it_is_read(
    store: Store, tmp_path: Path, kind: str
) -> None:
    made = experiences(8, reward=[1.0, None])
    store.append("experiences", made)
    frame = rows(made)
    frame.select("experience_id", "reward").write_ndjson(tmp_path / "in.jsonl")
    sources: dict[str, Any] = {
        "table": Table("experiences"),
        "sql": Sql("SELECT * FROM experiences -- all"),
        "file": File(str(tmp_path / "in.jsonl")),
        "frame": frame,
    }
    expect = {"source": build([{"not_null": "reward"}], "x")}
    with pytest.raises(
        JobError, match="the source of pipeline `p`: 4 of 8 rows, such as `g000/01`"
    ):
        Pipeline(name="p", source=sources[kind], expect=expect).run(store)
    assert store.count("lineage") == 0


def test_an_incremental_run_without_new_rows_still_checks_its_source(store: Store) -> None:
    store.append("experiences", experiences(4, reward=1.0))
    expect = {"source": build([{"row_count": {"max": 4}}], "x")}
    made = Pipeline(name="p", source=Table("experiences"), sink=None, expect=expect)
    made.run(store)
    made.run(store)
    assert store.count("expectations") == 2


def test_yaml_and_explain_have_them(store: Store) -> None:
    made = Pipeline.from_yaml(
        """
        name: clean
        source: {table: experiences}
        operators: [drop_flat_groups]
        expect:
          source: [{not_null: [reward, task_id], severity: warn}]
          sink:
            - {range: {reward: [0, 1]}, name: rewards are shares}
        """
    )
    text = made.explain(store)
    assert 'expect      source: not_null ["reward", "task_id"] (warn)' in text
    assert "expect      sink: rewards are shares (error)" in text
    for wrong, message in [
        ("expect: {sinks: []}", "did you mean `sink`"),
        ("expect: {sink: [{not_null: rewrad}]}", "`expect.sink`: .*`rewrad`"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Pipeline.from_yaml(f"name: x\nsource: {{table: experiences}}\n{wrong}\n").explain(store)


def test_results_hold_the_definition(store: Store) -> None:
    checked(store, {"range": {"reward": [0, None]}, "severity": "warn"})
    [(text,)] = store.sql("SELECT definition FROM expectations").fetchall()
    assert json.loads(text) == {"range": {"reward": [0, None]}, "severity": "warn"}
