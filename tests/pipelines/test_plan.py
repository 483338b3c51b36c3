"""What a pipeline refuses before any work, and what its plan says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.builders import experiences

from rlake.operators import (
    copy_best,
    drop_flat_groups,
    group_zscore,
    keep,
    leave_one_out,
    operator,
    pairs,
    score,
)
from rlake.pipelines import File, Pipeline, Sql, Table
from rlake.store import Store
from rlake.store.errors import ConfigError, InputError, NotFoundError, OperatorError, QueryError

EXPERIENCES = Table("experiences")


def test_the_plan_can_be_read_and_needs_no_store() -> None:
    pipeline = Pipeline(
        name="right_and_wrong",
        source=Table("experiences", where="source = 'imported'"),
        operators=[drop_flat_groups(), pairs()],
        sink=Table("preferences"),
    )
    assert pipeline.explain().splitlines()[:6] == [
        "pipeline    right_and_wrong",
        "source      table experiences where source = 'imported'",
        "            reads only experience_id, task_id, group_id, reward, messages, response_text",
        "1           filter drop_flat_groups(min_std=0.0)",
        "            reads reward, group_id; sees groups; whole: no row filter before it",
        f"2           reshape {pairs()}",
    ]


@pytest.mark.parametrize("late", [group_zscore(), leave_one_out(), drop_flat_groups()], ids=str)
def test_a_row_filter_before_an_operator_of_whole_groups_is_refused(late: Any) -> None:
    operators = [keep(where="reward > 0"), late]
    told = f"`keep` drops single rows before `{late.name}`.*put `{late.name}` before `keep`"
    with pytest.raises(OperatorError, match=told):
        Pipeline("x", EXPERIENCES, operators).explain()
    Pipeline("x", EXPERIENCES, operators[::-1]).explain()


@pytest.mark.parametrize(
    "source",
    [
        Table("experiences", where="reward > 0"),
        Sql("SELECT * FROM experiences WHERE reward > 0.5"),
        Sql("SELECT experience_id, group_id, reward FROM experiences WHERE reward > 0.5;"),
        Sql("WITH best AS (FROM experiences WHERE reward > 0.5) SELECT e.*, 1 AS one FROM best e"),
    ],
    ids=str,
)
def test_a_source_that_cuts_groups_is_refused_before_group_statistics(
    store: Store, source: Any
) -> None:
    store.append("experiences", experiences(4, reward=(1.0, 0.0, None, 0.0)))
    cut = Pipeline(name="x", source=source, operators=["group_zscore"])
    what = "where" if isinstance(source, Table) else "sql"
    with pytest.raises(OperatorError, match=f"`{what}` keeps 1 of 3 rewards of the group 'g000'"):
        cut.explain(store)
    with pytest.raises(OperatorError, match="put the condition as `keep` after"):
        cut.run(store)


def test_a_where_that_keeps_all_rewards_of_groups_is_taken(store: Store) -> None:
    store.append("experiences", experiences(4, reward=(1.0, 0.0, None, 0.0)))
    whole = Table("experiences", where="reward IS NOT NULL AND group_id = 'g000'")
    Pipeline(name="x", source=whole, operators=["group_zscore"]).explain(store)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM experiences",
        "SELECT * FROM experiences WHERE reward IS NOT NULL AND group_id = 'g000'",
        "SELECT * FROM experiences WHERE run_id = 'a'",
        "SELECT * REPLACE (experience_id || '/new' AS experience_id) FROM experiences LIMIT 1",
        "SELECT * REPLACE (task_id AS group_id) FROM experiences WHERE reward > 0.5",
        "SELECT 1 AS experience_id, 'g000' AS group_id, 1.0 AS reward",
    ],
)
def test_a_query_of_whole_groups_or_of_rows_that_are_not_stored_is_taken(
    store: Store, query: str
) -> None:
    tries = experiences(4, reward=(1.0, 0.0, None, 0.0), run_id="a")
    store.append("experiences", tries)
    others = [replace(e, experience_id=f"b/{e.experience_id}", run_id="b") for e in tries]
    store.append("experiences", others)
    Pipeline(name="x", source=Sql(query), operators=["group_zscore"]).explain(store)


@operator("derive", writes=("quality",))
def quality() -> Any:
    return lambda frame: frame.with_columns(quality=pl.col("rewrad"))


@pytest.mark.parametrize(
    ("error", "told", "parts"),
    [
        (QueryError, "rewrad", {"source": Table("experiences", where="rewrad > 0")}),
        (QueryError, "does not parse", {"source": Sql("SELECT FROM")}),
        (
            QueryError,
            "no table or view `experience`; did you mean",
            {"source": Sql("FROM experience")},
        ),
        (
            QueryError,
            "two columns `task_id`",
            {"source": Sql("SELECT e.*, t.* FROM experiences e, tasks t")},
        ),
        (NotFoundError, "no table `task`; did you mean `tasks`", {"source": Table("task")}),
        (InputError, "does not exist", {"source": File("nowhere.jsonl")}),
        (OperatorError, 'operator `quality`.*"rewrad"', {"operators": [quality()]}),
        (OperatorError, "operator `keep`.*rollouts", {"operators": [keep(where="rollouts = 0")]}),
        (OperatorError, "reads column `answer`", {"operators": [score()]}),
        (
            OperatorError,
            "stands last; put `group_zscore` before it",
            {"operators": [pairs(), group_zscore()]},
        ),
        (
            OperatorError,
            "neither `experience_id`",
            {"source": Sql("SELECT 1 AS reward"), "operators": [pairs()]},
        ),
        (
            ConfigError,
            "never change.*`preferences`",
            {"operators": [group_zscore()], "sink": EXPERIENCES},
        ),
        (ConfigError, "`draws` is not written by pipelines", {"sink": Table("draws")}),
        (
            ConfigError,
            "needs the column `preference_id`; end with `pairs`",
            {"sink": Table("preferences")},
        ),
        (ConfigError, "needs the column `scorer`; end with `score`", {"sink": Table("scores")}),
        (
            ConfigError,
            "`answer` is not a column of `experiences`",
            {
                "source": Sql(
                    "SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id)"
                ),
                "operators": [copy_best()],
                "sink": EXPERIENCES,
            },
        ),
        (ConfigError, "a sink has no `where`", {"sink": Table("tasks", where="true")}),
        (ConfigError, "written as .jsonl or .parquet, got `rows.csv`", {"sink": File("rows.csv")}),
        (ConfigError, "`sql` belongs to a source", {"sink": File("rows.jsonl", sql="FROM input")}),
    ],
)
def test_what_would_fail_later_is_refused_before_any_work(
    error: type[Exception], told: str, parts: dict[str, Any]
) -> None:
    with pytest.raises(error, match=told):
        Pipeline(**{"name": "x", "source": EXPERIENCES, **parts}).explain()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: x\nsorce: {table: tasks}", "no key `sorce`; did you mean `source`"),
        ("name: x\nsource: {tabel: tasks}", "`source` must be .* did you mean `table`"),
        (
            "name: x\nsource: {table: tasks, were: a}",
            "`source` has no key `were`; did you mean `where`",
        ),
        ("name: x\nsource: {table: 3}", "`source.table` got 3: input should be a valid string"),
        ("name: x\nsource: tasks", "`source` must be `{table: ...}` or .*, got 'tasks'"),
        (
            "name: x\nsource: {table: tasks}\nsink: {sql: x}",
            "`sink` must be `{table: ...}` or `{file: ...}`",
        ),
        ("name: 3\nsource: {table: tasks}", "`name` must be text, got 3"),
        ("source: {table: tasks}\noperators: []", "a pipeline needs `name`"),
        (
            "name: x\nsource: {table: tasks}\noperators: keep",
            "`operators` must be a list, got 'keep'",
        ),
        ("name: [", "is not valid YAML"),
        ("just words\n", "got str"),
    ],
)
def test_yaml_that_is_not_a_pipeline_is_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Pipeline.from_yaml(text)


def test_a_file_is_not_written_over_itself(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"experience_id": "a", "reward": 0.0}\n')
    rows = Pipeline(name="x", source=File(str(file)), sink=File(f"{tmp_path}/./rows.jsonl"))
    with pytest.raises(ConfigError, match="both read and written"):
        rows.plan()


def test_a_pipeline_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "look.yaml"
    path.write_text("name: look\nsource: {file: rows.csv, sql: FROM input}\n")
    assert Pipeline.from_yaml(str(path)).name == "look"
    assert str(Pipeline.from_yaml(path).source) == "file rows.csv by FROM input"
    with pytest.raises(InputError, match="cannot read"):
        Pipeline.from_yaml(tmp_path / "nowhere.yaml")
