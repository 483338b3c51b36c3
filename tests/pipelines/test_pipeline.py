"""Pipelines over a real store: what is written where, with reasons and lineage, and never twice."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.builders import RIGHT_AND_WRONG, experiences, task

import rlake
from rlake.operators import (
    clean_whitespace,
    copy_best,
    drop_flat_groups,
    group_zscore,
    keep,
    pairs,
    score,
)
from rlake.pipelines import File, Pipeline, Sql, Table
from rlake.pipelines.writing.files import FileWriter
from rlake.store import Store
from rlake.store.errors import ConflictError, JobError, OperatorError, SchemaError
from rlake.store.ids import content_id
from rlake.store.replay import Sampler

RIGHT_AND_WRONG_YAML = """
name: right_and_wrong
source: {table: experiences, where: "source = 'imported'"}
operators: [drop_flat_groups, {pairs: {strategy: max_min}}]
sink: {table: preferences}
"""
EXPERIENCES = Table("experiences")
SCORED = Sql("SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id)")


def filled(store: Store) -> Store:
    """Store one group that is right and wrong, one that is right, and a row of another source."""
    store.append("tasks", [task(0), task(1)])
    rewards = (*RIGHT_AND_WRONG, 1.0, 1.0, 1.0, 1.0)
    store.append("experiences", experiences(8, reward=rewards, source="imported"))
    store.append(
        "experiences", experiences(1, reward=0.5, group_id="other", experience_id="other/00")
    )
    return store


def over(*operators: Any, source: Any = EXPERIENCES, sink: Any = None, name: str = "x") -> Pipeline:
    return Pipeline(name=name, source=source, operators=operators, sink=sink)


def read(store: Store, query: str) -> list[tuple[Any, ...]]:
    return store.sql(query).fetchall()


def test_pairs_are_stored_with_a_reason_for_every_row_that_is_in_none(store: Store) -> None:
    report = Pipeline.from_yaml(RIGHT_AND_WRONG_YAML).run(filled(store))
    assert (report.rows_in, report.rows_out, report.rows_dropped) == (8, 1, 6)
    assert read(store, "SELECT * EXCLUDE (created_at, digest, lineage_id) FROM preferences") == [
        (
            content_id("g000/00", "g000/01"),
            task(0).task_id,
            "g000/00",
            "g000/01",
            1.0,
            "pipeline right_and_wrong",
        )
    ]
    why = "SELECT operator, reason, list(experience_id) FROM drops GROUP BY ALL ORDER BY ALL"
    assert read(store, why) == [
        (
            "drop_flat_groups",
            "rewards of its group do not differ (std is not above 0)",
            [f"g001/0{i}" for i in range(4)],
        ),
        ("pairs", "an equal reply of its group counts", ["g000/02", "g000/03"]),
    ]
    assert [(d.operator, d.rows) for d in report.dropped] == [("drop_flat_groups", 4), ("pairs", 2)]


def test_lineage_says_what_ran_over_which_versions(store: Store) -> None:
    version = filled(store).versions()["experiences"]
    report = Pipeline.from_yaml(RIGHT_AND_WRONG_YAML).run(store)
    [line] = store.scan("lineage").collect().to_dicts()
    assert line["lineage_id"] == report.lineage_id
    assert line["source"] == "table experiences where source = 'imported'"
    assert line["source_versions"] == [{"name": "experiences", "version": version}]
    assert line["sink_versions"] == [
        {"name": "preferences", "version": store.versions()["preferences"]}
    ]
    assert (line["rows_in"], line["rows_out"], line["rows_dropped"]) == (8, 1, 6)
    first, second = line["operators"]
    assert first["fingerprint"] == drop_flat_groups().fingerprint
    assert (first["rows_in"], first["rows_out"]) == (8, 4)
    assert second["params"].startswith('{"strategy": "max_min", "min_margin": 0.0')


def test_a_second_run_stores_nothing_twice(store: Store) -> None:
    pipeline = Pipeline.from_yaml(RIGHT_AND_WRONG_YAML)
    filled(store)
    first, second = pipeline.run(store), pipeline.run(store, full=True)
    assert (first.rows_out, second.rows_out, second.already) == (1, 0, 1)
    assert first.lineage_id != second.lineage_id
    assert (store.count("preferences"), store.count("lineage")) == (1, 2)


def test_the_same_pair_from_two_pipelines_is_one_pair(store: Store) -> None:
    pipeline = Pipeline.from_yaml(RIGHT_AND_WRONG_YAML.replace("name: right", "name: left"))
    filled(store)
    Pipeline.from_yaml(RIGHT_AND_WRONG_YAML).run(store)
    assert (pipeline.run(store).already, store.count("preferences")) == (1, 1)


KILLED = """
import os, sys
import rlake
from rlake.pipelines import Pipeline
store = rlake.connect(sys.argv[1])
append = store.append
def dying(name, rows):
    if name == sys.argv[2]:
        os._exit(9)
    return append(name, rows)
store.append = dying
Pipeline.from_yaml(sys.argv[3]).run(store)
"""


@pytest.mark.parametrize(("table", "stored"), [("preferences", 0), ("lineage", 1)])
def test_a_run_that_was_killed_does_not_count_and_can_be_run_again(
    store: Store, table: str, stored: int
) -> None:
    filled(store)
    command = [sys.executable, "-c", KILLED, store.uri, table, RIGHT_AND_WRONG_YAML]
    assert subprocess.run(command, check=False, cwd=Path(store.uri).parent).returncode == 9
    assert (store.count("preferences"), store.count("lineage")) == (stored, 0)
    report = Pipeline.from_yaml(RIGHT_AND_WRONG_YAML).run(store)
    assert report.rows_out + report.already == 1
    assert (store.count("preferences"), store.count("lineage")) == (1, 1)
    counting = "SELECT count(*) FROM drops JOIN lineage USING (lineage_id)"
    assert read(store, counting) == [(6,)]


def test_an_operator_that_breaks_its_law_leaves_the_store_as_it_was(store: Store) -> None:
    before = filled(store).versions()
    wrong = over({"priority": {"expression": "reward - 1"}}, pairs(), sink=Table("preferences"))
    with pytest.raises(OperatorError, match="operator `priority`"):
        wrong.run(store)
    assert store.versions() == before


def test_verdicts_of_score_go_to_scores_and_rewards_stay(store: Store) -> None:
    filled(store)
    rescore = over(score(), source=SCORED, sink=Table("scores"), name="rescore")
    assert (rescore.run(store).rows_out, rescore.run(store, full=True).already) == (9, 9)
    query = "SELECT value, scorer, count(*) FROM scores GROUP BY ALL ORDER BY ALL"
    assert read(store, query) == [(0.0, "exact_match", 2), (1.0, "exact_match", 7)]
    other = Sql(SCORED.sql.replace("t.answer", "'other' AS answer"))
    with pytest.raises(ConflictError, match="give the new row an id of its own"):
        over(score(), source=other, sink=Table("scores")).run(store)


def test_an_augment_adds_its_new_rows_only_and_only_once(store: Store) -> None:
    filled(store)
    best = over(group_zscore(), copy_best(min_reward=1.0), sink=EXPERIENCES)
    assert (best.run(store).rows_out, best.run(store).rows_out) == (2, 0)
    query = "SELECT parent_id, reward FROM experiences WHERE source = 'synthetic' ORDER BY ALL"
    assert read(store, query) == [("g000/00", 1.0), ("g001/00", 1.0)]
    assert read(store, "SELECT count(*) FROM experiences WHERE advantage IS NOT NULL") == [(2,)]


def test_what_an_augment_makes_of_a_runs_rows_is_never_drawn_as_the_runs_own(store: Store) -> None:
    small = {"run_id": "small", "batch": 1, "policy_version": 0}
    store.append("experiences", experiences(4, reward=RIGHT_AND_WRONG, **small))
    assert over(copy_best(), sink=EXPERIENCES).run(store).rows_out == 1
    synthetic = "SELECT count(*) FROM experiences WHERE source = 'synthetic'"
    assert read(store, synthetic) == [(1,)]
    assert read(store, f"{synthetic} AND (run_id = 'small' OR batch IS NOT NULL)") == [(0,)]
    sampler = Sampler(store, run_id="small", grouped=True)
    assert sampler.supply(1, 0).fresh == 1
    draw = sampler.draw(1, step=1, policy_version=0)
    assert draw is not None
    drawn = sampler.read(draw, ["experience_id", "source"])
    assert drawn["experience_id"].to_list() == [f"g000/0{i}" for i in range(4)]
    assert set(drawn["source"]) == {"explorer"}


def test_rows_of_a_query_that_are_stored_stay_as_they_are(store: Store) -> None:
    filled(store)
    part = Sql(
        "SELECT experience_id, task_id, group_id, rollout_index, reward, source FROM experiences"
    )
    assert over(copy_best(), source=part, sink=EXPERIENCES).run(store).rows_out == 3
    assert store.count("experiences") == 12


def test_a_file_becomes_a_file_whole_or_not_at_all(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "rows.jsonl"
    pl.DataFrame({"experience_id": ["a", "b"], "response_text": [" 4 ", "5"]}).write_ndjson(path)
    written = tmp_path / "out" / "clean.jsonl"
    chain = (clean_whitespace(), keep(where="response_text = '4'"))
    report = over(*chain, source=File(str(path)), sink=File(str(written))).run(store)
    assert pl.read_ndjson(written).rows() == [("a", "4")]
    assert [p.name for p in written.parent.iterdir()] == ["clean.jsonl"]
    assert (report.rows_in, report.rows_out) == (2, 1)
    assert read(store, "SELECT experience_id, reason FROM drops") == [
        ("b", "not true: response_text = '4'")
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_file_that_is_not_finished_leaves_the_old_one_alone(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_text("old")
    rows = pl.DataFrame({"x": [1, 2]})
    writer = FileWriter(path, rows.schema)
    writer.put(rows)
    writer.close()
    assert (path.read_text(), [p.name for p in tmp_path.iterdir()]) == ("old", [path.name])
    (tmp_path / "a-file").touch()
    with pytest.raises(JobError, match=f"cannot write `{tmp_path}/a-file/rows{suffix}`: "):
        FileWriter(tmp_path / "a-file" / f"rows{suffix}", rows.schema)


def test_a_file_of_new_experiences_is_stored_with_what_operators_set(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "rows.parquet"
    frame = pl.DataFrame([e.row() for e in experiences(4, reward=RIGHT_AND_WRONG, source="expert")])
    frame.select(
        "experience_id", "task_id", "group_id", "rollout_index", "source", "reward"
    ).write_parquet(path)
    taken = over(group_zscore(), source=File(str(path)), sink=EXPERIENCES)
    assert (taken.run(store).rows_out, taken.run(store, full=True).already) == (4, 4)
    query = "SELECT round(advantage, 3) FROM experiences ORDER BY experience_id"
    assert read(store, query) == [(0.866,), (-0.866,), (-0.866,), (0.866,)]


def test_tasks_with_other_content_become_tasks_of_their_own(store: Store) -> None:
    filled(store)
    easy = Sql("SELECT * REPLACE ('easy' AS taskset) FROM tasks WHERE taskset = 'default'")
    renamed = over(keep(where="answer = '2'"), source=easy, sink=Table("tasks"))
    assert (renamed.run(store).rows_out, renamed.run(store).already) == (1, 1)
    assert read(store, "SELECT count(DISTINCT task_id), count(*) FROM tasks") == [(3, 3)]
    assert read(store, "SELECT task_id, reason FROM drops LIMIT 1") == [
        (task(0).task_id, "not true: answer = '2'")
    ]


def test_a_task_whose_text_alone_was_changed_is_refused(store: Store) -> None:
    filled(store)
    source = Sql("SELECT * REPLACE ('  ' || prompt_text || '?' AS prompt_text) FROM tasks")
    cleaned = over(clean_whitespace(column="prompt_text"), source=source, sink=Table("tasks"))
    with pytest.raises(SchemaError, match="differs from its `messages`"):
        cleaned.run(store)


def test_without_a_sink_the_rows_are_returned_and_the_run_is_still_recorded(store: Store) -> None:
    filled(store)
    report = over("group_zscore").run(store)
    assert report.rows is not None
    assert report.rows["advantage"].null_count() == 0
    assert store.count("lineage") == 1


def test_a_frame_in_memory_is_a_source_too(store: Store) -> None:
    filled(store)
    lazy = store.scan("experiences").filter(pl.col("reward") == 1.0)
    report = over(keep(where="rollout_index = 0"), source=lazy).run(store)
    assert (report.rows_in, report.rows_out) == (6, 2)


def test_two_rows_of_one_id_are_refused_before_operators_run(store: Store) -> None:
    twice = Sql("SELECT * FROM experiences UNION ALL SELECT * FROM experiences")
    with pytest.raises(OperatorError, match="'g000/00' is there more than once"):
        over("group_zscore", source=twice).run(filled(store))


def test_a_run_reads_one_state_of_the_store(store: Store, tmp_path: Path) -> None:
    """Versions are fixed at the start: rows that come later are not in it, and lineage tells."""
    version = filled(store).versions()["experiences"]
    report = Pipeline.from_yaml(RIGHT_AND_WRONG_YAML).run(store)
    store.append(
        "experiences",
        experiences(4, reward=0.0, source="imported", group_id="late", experience_id="late/00")[:1],
    )
    [(versions,)] = read(store, "SELECT source_versions FROM lineage")
    then = rlake.connect(store.uri).at({"experiences": versions[0]["version"]})
    assert versions[0]["version"] == version
    assert then.sql("SELECT count(*) FROM experiences WHERE source = 'imported'").fetchall() == [
        (report.rows_in,)
    ]
