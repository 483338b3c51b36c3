"""A plan tells what a run would read and make now, what it cost so far, and why."""

from typing import Any

import polars as pl
import pytest
from support.builders import RIGHT_AND_WRONG, experiences

from rlake.operators import Rows, drop_flat_groups, group_zscore, keep, operator
from rlake.pipelines import Pipeline, Sql, Table
from rlake.pipelines.explain import Explanation, explained
from rlake.store import Store


@operator("derive", reads=("response_text",))
def words() -> Rows:
    def count(row: dict[str, Any]) -> dict[str, Any]:
        return {"words": len((row["response_text"] or "").split())}

    return Rows(count, {"words": pl.Int64})


CHAIN = Pipeline(
    name="p",
    source=Table("experiences"),
    operators=[drop_flat_groups(), group_zscore(), keep(where="advantage > 0"), words()],
    sink=Table("experience_values"),
)


def explain(pipeline: Pipeline, store: Store) -> Explanation:
    return explained(pipeline, pipeline.plan(), store)


def test_before_the_first_run_nothing_is_known_but_what_the_kinds_say(store: Store) -> None:
    store.append("experiences", experiences(12, reward=(*RIGHT_AND_WRONG, 1.0, 1.0, 1.0, 1.0)))
    told = explain(CHAIN, store)
    assert (told.rows, told.to_read, told.runs) == (12, 12, 0)
    assert [(s.rows_in, s.rows_out) for s in told.steps] == [
        (12, None),
        (None, None),
        (None, None),
        (None, None),
    ]
    lines = str(told).splitlines()
    assert "now         a run reads everything: there was no such run yet" in lines
    assert any("12 rows in, at most 12 out" in line for line in lines)
    assert lines[-1] == "so far      no run"


def test_after_a_run_rows_expected_costs_and_answers_are_known(store: Store) -> None:
    rows = experiences(24, reward=(*RIGHT_AND_WRONG, 1.0, 1.0, 1.0, 1.0))
    store.append("experiences", rows[:8])
    CHAIN.run(store)
    store.append("experiences", rows[8:])
    told = explain(CHAIN, store)
    assert (told.rows, told.to_read, told.runs) == (24, 16, 1)
    assert [(s.rows_in, s.rows_out, s.is_exact) for s in told.steps] == [
        (16, 8, False),
        (8, 8, False),
        (8, 4, False),
        (4, 4, False),
    ]
    assert [s.scope for s in told.steps] == ["group", "group", "row", "row"]
    assert told.steps[3].cached == 1
    assert told.steps[0].rows_before == 8
    assert told.steps[0].seconds_before > 0
    text = str(told)
    assert "now         a run reads 16 rows that came since" in text
    assert "with the rest of their groups" in text
    assert "16 rows in, about 8 out; so far 8 rows in" in text
    assert "1 answer known" in text
    assert "so far      1 run, " in text
    assert "8 rows in, 4 out, 6 dropped" in text


def test_an_operator_of_another_pipeline_tells_its_share_too(store: Store) -> None:
    store.append("experiences", experiences(8, reward=RIGHT_AND_WRONG))
    right = keep(where="reward > 0.5")
    Pipeline("one", Table("experiences"), [right]).run(store)
    other = explain(Pipeline("two", Table("experiences"), [words(), right]), store)
    assert (other.runs, other.steps[1].rows_out) == (0, 4)


def test_a_plan_with_nothing_to_do_says_so(store: Store) -> None:
    store.append("experiences", experiences(8, reward=RIGHT_AND_WRONG))
    CHAIN.run(store)
    told = explain(CHAIN, store)
    assert told.to_read == 0
    assert "a run reads nothing: no row came since" in str(told)


@pytest.mark.parametrize("source", [Sql("SELECT * FROM experiences"), None], ids=("sql", "frame"))
def test_a_source_that_must_be_read_to_be_counted_has_no_count(store: Store, source: Any) -> None:
    store.append("experiences", experiences(8, reward=RIGHT_AND_WRONG))
    given = source or store.scan("experiences").collect()
    told = explain(Pipeline("p", given, [words()]), store)
    assert (told.rows, told.steps[0].rows_in) == (None, None)
    assert "unknown rows in, unknown out" in str(told)
