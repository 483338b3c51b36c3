"""The commands that run pipelines: what is read, remembered and told, and exit codes."""

from pathlib import Path

import pytest
from support.builders import RIGHT_AND_WRONG, experiences
from support.commands import Command, last_json, refused

from rlake.loop.cli.pipeline import status
from rlake.pipelines.report import Dropped, Progress, Step
from rlake.store import Store

PAIRS = """
name: pairs
source: {table: experiences}
operators: [drop_flat_groups, pairs]
sink: {table: preferences}
"""


@pytest.fixture
def file(lake: Store, rlake: Command) -> Path:
    """A pipeline's file in the current folder, and eight rows in the store."""
    rows = experiences(12, reward=(*RIGHT_AND_WRONG, 1.0, 1.0, 1.0, 1.0))
    lake.append("experiences", rows[:8])
    Path("pairs.yaml").write_text(PAIRS)
    return Path("pairs.yaml")


def test_run_reads_what_is_new_and_with_full_everything(
    rlake: Command, lake: Store, file: Path
) -> None:
    said = rlake("pipeline", "run", file)
    assert "pairs: 8 rows in, 1 out" in said.stdout
    assert "4  drop_flat_groups: rewards of its group do not differ" in said.stdout
    assert last_json(rlake("pipeline", "run", file, "--json"))["rows_in"] == 0
    rows = experiences(12, reward=(*RIGHT_AND_WRONG, 1.0, 1.0, 1.0, 1.0))
    lake.append("experiences", rows[8:])
    new = last_json(rlake("pipeline", "run", file, "--json"))
    assert (new["rows_in"], new["rows_seen_before"], new["rows_out"]) == (4, 8, 1)
    full = last_json(rlake("pipeline", "run", file, "--full", "--json"))
    assert (full["rows_in"], full["rows_out"], full["already"]) == (12, 0, 2)


def test_an_executor_that_is_not_there_is_told(rlake: Command, file: Path) -> None:
    refused(rlake("pipeline", "run", file, "--executor", "locl"), "`locl`", "did you mean `local`")


def test_explain_tells_what_a_run_would_read_and_what_runs_did(rlake: Command, file: Path) -> None:
    before = rlake("pipeline", "explain", file).stdout
    assert "now         a run reads everything: there was no such run yet" in before
    rlake("pipeline", "run", file)
    after = rlake("pipeline", "explain", file).stdout
    assert "now         a run reads nothing: no row came since" in after
    assert "so far      1 run, " in after
    found = last_json(rlake("pipeline", "explain", file, "--json"))
    assert [step["operator"] for step in found["steps"]] == ["drop_flat_groups", "pairs"]
    assert (found["rows"], found["to_read"], found["runs"]) == (8, 0, 1)


def test_watch_prints_a_line_for_each_run_and_ends_when_idle(rlake: Command, file: Path) -> None:
    said = rlake("pipeline", "watch", file, "--until-idle", "0.1")
    assert said.returncode == 0
    [line] = said.stdout.splitlines()
    assert line.startswith("pairs: 8 rows in, 1 out")
    assert rlake("pipeline", "watch", file, "--until-idle", "0").stdout == ""


def test_a_run_is_drawn_with_its_speed_and_what_it_drops_most() -> None:
    dropped = (Dropped("keep", "not true: x", 2), Dropped("brief", "9 characters", 5))
    steps = (Step("keep", "filter", 100, 98, failed=3),)
    now = Progress(
        stage=1, stages=1, rows=200, treated=100, seconds=0.5, steps=steps, dropped=dropped
    )
    assert status(now) == "200 rows/s; 7 dropped, most by brief: 9 characters; 3 failed"


def test_memory_is_shown_and_cleared(rlake: Command, lake: Store, file: Path) -> None:
    import polars as pl

    from rlake.operators import Rows, operator
    from rlake.pipelines.cache import OperatorCache

    @operator("derive", reads=("response_text",))
    def words() -> Rows:
        return Rows(lambda row: {"words": len(row["response_text"])}, {"words": pl.Int64})

    assert rlake("pipeline", "cache").stdout == "cached: 0 results, 0.0 MiB\n"
    rows = pl.DataFrame({"experience_id": ["a", "b"], "response_text": ["one", "three"]})
    OperatorCache(lake).apply(words(), rows)
    shown = rlake("pipeline", "cache")
    assert "words()" in shown.stdout
    assert "cached: 2 results" in shown.stdout
    assert last_json(rlake("pipeline", "cache", "--clear", "--json"))["is_cleared"] is True
    assert rlake("pipeline", "cache").stdout.startswith("cached: 0 results")


def test_a_plan_of_expressions_is_told_in_json_and_nothing_else_is_printed(
    rlake: Command, lake: Store
) -> None:
    Path("keep.yaml").write_text(
        "name: kept\nsource: {table: experiences}\noperators: [{keep: {where: reward > 9}}]\n"
        "sink: {file: kept.jsonl}\n"
    )
    lake.append("experiences", experiences(4, reward=0.0))
    [step] = last_json(rlake("pipeline", "explain", "keep.yaml", "--json"))["steps"]
    assert (step["rows_in"], step["most_in"], step["rows_out"]) == (4, 4, None)
    done = rlake("pipeline", "run", "keep.yaml")
    assert done.stdout.startswith("kept: 4 rows in, 0 out")
    assert done.stderr == "", "a bar is drawn on terminals only"


def test_a_pipeline_whose_source_is_empty_did_nothing(rlake: Command, lake: Store) -> None:
    text = """
name: none
source: {table: tasks, where: "split = 'nosuch'"}
operators: []
"""
    Path("none.yaml").write_text(text)
    refused(
        rlake("pipeline", "run", "none.yaml"),
        "pipeline `none` did nothing: its source has no rows",
        code=1,
    )
