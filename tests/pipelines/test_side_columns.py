"""Pipelines read side columns beside the facts, and store what operators derive as such."""

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest
from support.builders import RIGHT_AND_WRONG, experiences

from rlake.operators import group_zscore, keep, operator, pairs
from rlake.pipelines import Pipeline, Sql, Table
from rlake.store import Store
from rlake.store.errors import ConfigError, NotFoundError, OperatorError, QueryError

STRICT = {"scorer": "strict", "scorer_version": "2"}


@operator("derive")
def length(*, factor: float = 1.0) -> pl.Expr:
    return (pl.col("response_text").str.len_chars() * factor).alias("length")


@operator("derive")
def first_word() -> pl.Expr:
    return pl.col("response_text").str.split(" ").list.first().alias("word")


@operator("derive")
def words() -> pl.Expr:
    return pl.col("response_text").str.split(" ").alias("words")


@operator("prioritize", reads=("experience_id",))
def by_times_scored(*, rank: int = 1) -> pl.Expr:
    return (pl.int_range(pl.len()) + rank).alias("priority")


@pytest.fixture
def judged(store: Store) -> Store:
    """One group of rewards 1, 0, 0, 1, and a scorer that says the opposite."""
    rows = experiences(4, reward=RIGHT_AND_WRONG)
    store.append("experiences", rows)
    verdicts = [
        {"experience_id": e.experience_id, "value": 1.0 - (e.reward or 0.0), **STRICT} for e in rows
    ]
    store.append("scores", verdicts)
    return store


def read(store: Store, query: str) -> list[tuple[Any, ...]]:
    return store.sql(query).fetchall()


def kept(store: Store, source: Table, *operators: Any) -> list[str]:
    rows = Pipeline(name="p", source=source, operators=operators).run(store).rows
    assert rows is not None
    return rows["experience_id"].to_list()


def test_a_pipeline_may_read_another_reward(judged: Store) -> None:
    strict = Table("experiences", with_columns=["reward=score:strict@2"])
    assert kept(judged, Table("experiences"), keep(where="reward > 0")) == ["g000/00", "g000/03"]
    assert kept(judged, strict, keep(where="reward > 0")) == ["g000/01", "g000/02"]
    assert read(judged, "SELECT sum(reward) FROM experiences") == [(2.0,)], "facts stay"


def test_a_where_may_name_side_columns(judged: Store) -> None:
    both = Table("experiences", where="strict > reward", with_columns=["score:strict"])
    assert kept(judged, both) == ["g000/01", "g000/02"]


def test_pairs_of_another_reward_are_stored_and_lineage_says_which(judged: Store) -> None:
    text = """
    name: strict_pairs
    source: {table: experiences, with_columns: ["reward=score:strict@2"]}
    operators: [{pairs: {strategy: max_min}}]
    sink: {table: preferences}
    """
    Pipeline.from_yaml(text).run(judged)
    [(chosen, rejected)] = read(judged, "SELECT chosen_id, rejected_id FROM preferences")
    assert (chosen, rejected) == ("g000/01", "g000/00")
    [(source, versions)] = read(judged, "SELECT source, source_versions FROM lineage")
    assert source == "table experiences with reward=score:strict@2"
    assert [v["name"] for v in versions] == ["experiences", "scores"]


def test_a_where_on_another_reward_may_not_cut_groups(judged: Store) -> None:
    source = Table("experiences", where="reward > 0", with_columns=["reward=score:strict@2"])
    with pytest.raises(OperatorError, match="keeps 2 of 4 rewards of the group 'g000'"):
        kept(judged, source, group_zscore())


def test_a_wrong_side_column_is_found_before_any_work(judged: Store) -> None:
    for source, error, told in (
        (Table("experiences", with_columns=["scor:x"]), QueryError, "did you mean `score`"),
        (Table("tasks", with_columns=["score:strict"]), QueryError, "are of `experiences`"),
        (Table("experiences", with_columns=["score:strikt"]), NotFoundError, "mean `strict`"),
    ):
        with pytest.raises(error, match=told):
            kept(judged, source)
    assert judged.count("lineage") == 0


def derive(store: Store, *operators: Any, source: Any = None) -> tuple[int, int]:
    pipeline = Pipeline(
        name="derive",
        source=source or Table("experiences"),
        operators=operators,
        sink=Table("experience_values"),
    )
    report = pipeline.run(store, full=True)
    return report.rows_out, report.already


def test_what_operators_derive_is_stored_and_read_by_name(judged: Store) -> None:
    assert derive(judged, length(), first_word()) == (8, 0)
    wanted = ["derived:length", "derived:word.text", f"derived:length@{length().fingerprint[:12]}"]
    frame = judged.scan("experiences", with_columns=[*wanted[:2], f"again={wanted[2]}"])
    rows = frame.sort("experience_id").select("length", "word", "again").collect().rows()
    assert rows == [(1.0, "0", 1.0), (7.0, "no", 7.0), (7.0, "no", 7.0), (1.0, "0", 1.0)]
    [(made,)] = read(
        judged, "SELECT count(*) FROM experience_values JOIN lineage USING (lineage_id)"
    )
    assert made == 8


def test_values_that_are_the_same_are_stored_once(judged: Store) -> None:
    derive(judged, length())
    assert derive(judged, length()) == (0, 4)
    assert derive(judged, length(factor=2.0)) == (4, 0), "another parameter is another version"
    frame = judged.scan("experiences", with_columns=["derived:length"])
    assert sorted(frame.collect()["length"]) == [2.0, 2.0, 14.0, 14.0]


def test_a_value_that_came_out_otherwise_is_a_new_row_that_counts(judged: Store) -> None:
    part = Table("experiences", where="rollout_index > 0")
    assert derive(judged, by_times_scored()) == (4, 0)
    assert derive(judged, by_times_scored(), source=part) == (3, 0)
    assert derive(judged, by_times_scored(), source=part) == (0, 3)
    frame = judged.scan("experiences", with_columns=["derived:priority"]).sort("experience_id")
    assert frame.collect()["priority"].to_list() == [1.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("operators", "told"),
    [
        ((), "takes the columns that operators derive, and none here does"),
        ((keep(where="reward > 0"),), "none here does"),
        ((words(),), "takes numbers and text, and `words` is List"),
    ],
)
def test_what_cannot_be_a_derived_value_is_refused(
    judged: Store, operators: Sequence[Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        derive(judged, *operators)


def test_a_sink_has_no_side_columns(judged: Store) -> None:
    sink = Table("preferences", with_columns=["score:strict"])
    pipeline = Pipeline(name="p", source=Table("experiences"), operators=[pairs()], sink=sink)
    with pytest.raises(ConfigError, match="a sink has no `with_columns`"):
        pipeline.run(judged)


def test_derived_values_need_the_id_of_an_experience(store: Store) -> None:
    tasks = Sql("SELECT task_id, answer AS response_text FROM tasks")
    with pytest.raises(ConfigError, match="needs the column `experience_id`"):
        derive(store, length(), source=tasks)
