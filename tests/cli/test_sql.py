"""What people see: sql, tables, show, snapshot, help."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.commands import Command, last_json, refused

from rlake.store import Experience, Store, Task
from rlake.store.schema import TABLES

TASK = Task.ask("2+2=", "4")
RUN = {
    "run_id": "demo",
    "attempt": 1,
    "name": "demo",
    "config": "{}",
    "code_version": "0",
    "start_step": 1,
}


def tried(rollout: int, text: str, rewards: dict[str, float | None]) -> Experience:
    return Experience(
        task_id=TASK.task_id,
        experience_id=f"demo/000001/0000/{rollout:02d}",
        group_id="demo/000001/0000",
        rollout_index=rollout,
        run_id="demo",
        batch=1,
        policy_version=0,
        prompt_text="2+2=",
        response_text=text,
        finish_reason="stop",
    ).with_reward(rewards)


def drawn(step: int, experience_id: str) -> dict[str, Any]:
    return {
        "run_id": "demo",
        "attempt": 1,
        "step": step,
        "position": 0,
        "experience_id": experience_id,
        "epoch": 1,
        "weight": 1.0,
        "lag": step - 1,
        "sampler": "fifo",
        "digest": "d",
    }


@pytest.fixture
def lake(lake: Store) -> Store:
    """Return the store with a run of one group of two rollouts, one of them drawn twice."""
    right = tried(0, "4", {"right": 1.0, "format": 0.5})
    wrong = tried(1, "[bold]five[/bold]", {"right": 0.0, "format": None})
    lake.append("experiences", [right, wrong])
    lake.append("draws", [drawn(1, "demo/000001/0000/00"), drawn(2, "demo/000001/0000/00")])
    jobs = [RUN | {"job": job, "status": "done"} for job in ("explore", "train")]
    lake.append("job_events", jobs)
    return lake


def table(said: CompletedProcess[str]) -> list[list[str]]:
    """Return the printed lines, split at gaps of two blanks or more."""
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_sql_prints_a_table_with_null_as_null(rlake: Command, lake: Store) -> None:
    query = "SELECT rollout_index, reward, response_text FROM experiences ORDER BY 1"
    assert table(rlake("sql", query)) == [
        ["rollout_index", "reward", "response_text"],
        ["0", "1.5", "4"],
        ["1", "NULL", "[bold]five[/bold]"],
        ["(2 rows)"],
    ]


def test_sql_says_when_there_are_more_rows(rlake: Command, lake: Store) -> None:
    said = rlake("sql", "SELECT rollout_index FROM experiences ORDER BY 1", "--rows", "1")
    assert "(first 1 row; see more with `--rows N`, all with `--format`)" in said.stdout
    assert len(json.loads(rlake("sql", "SELECT 1 FROM experiences", "--json").stdout)) == 2


def test_sql_prints_one_long_row_whole(rlake: Command, lake: Store) -> None:
    said = rlake("sql", "SELECT repeat('word ', 400) || 'end' AS text, 1 AS n")
    assert "end" in said.stdout


def test_sql_json_is_a_list_of_row_objects(rlake: Command, lake: Store) -> None:
    query = "SELECT rollout_index, reward, rewards, 0 / 0.0 AS odd FROM experiences ORDER BY 1"
    assert json.loads(rlake("sql", query, "--json").stdout) == [
        {
            "rollout_index": 0,
            "reward": 1.5,
            "rewards": [{"name": "right", "value": 1.0}, {"name": "format", "value": 0.5}],
            "odd": None,
        },
        {
            "rollout_index": 1,
            "reward": None,
            "rewards": [{"name": "right", "value": 0.0}, {"name": "format", "value": None}],
            "odd": None,
        },
    ]
    assert json.loads(rlake("sql", "SELECT 1 FROM drops", "--json").stdout) == []
    refused(rlake("sql", "SELECT 1 AS a, 2 AS a", "--json"), "two columns are called `a`", "`AS`")


def test_sums_of_integers_are_integers_in_json(rlake: Command, lake: Store) -> None:
    query = "SELECT sum(x) AS n, (1::DECIMAL(5, 2)) AS d FROM range(3) AS t (x)"
    printed = rlake("sql", query, "--format", "jsonl").stdout
    assert printed == '{"n": 3, "d": 1.0}\n'


def test_sql_explains_a_plan(rlake: Command, lake: Store) -> None:
    assert "experiences" not in rlake("sql", "SELECT 1").stdout
    assert rlake("sql", "EXPLAIN SELECT * FROM groups").stdout.count("\n") > 5


def test_tables_counts_every_table(rlake: Command, lake: Store) -> None:
    listed = last_json(rlake("tables", "--json"))["tables"]
    assert {t["table"]: t["rows"] for t in listed} == {n: lake.count(n) for n in TABLES}
    said = rlake("tables").stdout
    assert all(name in said for name in (*TABLES, "groups", "backlog"))


@pytest.mark.parametrize("name", [*TABLES, "groups", "steps", "backlog", "runs"])
def test_tables_lists_the_columns_of_each(rlake: Command, lake: Store, name: str) -> None:
    found = last_json(rlake("tables", name, "--json"))
    columns = lake.sql(f"SELECT * FROM {name}").columns
    assert [c["column"] for c in found["columns"]] == columns
    said = rlake("tables", name).stdout
    assert all(column in said for column in columns)


def test_show_tells_all_of_an_experience(rlake: Command, lake: Store) -> None:
    found = last_json(rlake("show", "demo/000001/0000/00", "--json"))
    assert (found["kind"], found["id"]) == ("experience", "demo/000001/0000/00")
    assert found["task"]["answer"] == "4"
    assert [d["step"] for d in found["draws"]] == [1, 2]
    said = rlake("show", "demo/000001/0000/00").stdout
    assert ["reward", "1.5"] in table(rlake("show", "demo/000001/0000/00"))
    for words in ("right 1", "format 0.5", "2+2=", "draws", "fifo"):
        assert words in said


def test_show_says_null_for_a_reward_that_was_not_computed(rlake: Command, lake: Store) -> None:
    said = rlake("show", "demo/000001/0000/01").stdout
    assert ["reward", "NULL"] in table(rlake("show", "demo/000001/0000/01"))
    assert "format NULL" in said
    assert "[bold]five[/bold]" in said
    assert "draws: none" in said


@pytest.mark.parametrize(
    ("id", "kind", "words"),
    [
        ("demo/000001/0000", "group", "num_rollouts"),
        ("demo/0", "group", "num_rollouts"),
        ("demo", "run", "explore"),
        (TASK.task_id, "task", "2+2="),
        (TASK.task_id[:8], "task", "2+2="),
    ],
)
def test_show_knows_what_an_id_or_its_beginning_names(
    rlake: Command, lake: Store, id: str, kind: str, words: str
) -> None:
    assert last_json(rlake("show", id, "--json"))["kind"] == kind
    assert words in rlake("show", id).stdout


def test_a_beginning_of_several_ids_is_refused(rlake: Command, lake: Store) -> None:
    refused(
        rlake("show", "demo/000001/0000/"),
        "matches 2 IDs, such as experience `demo/000001/0000/00`",
    )


def test_the_store_may_be_named_before_or_after_the_command(
    rlake: Command, lake: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLAKE_STORE", str(tmp_path / "elsewhere"))
    assert rlake("tables").returncode == 2
    assert rlake("--store", lake.uri, "tables").returncode == 0
    assert rlake("tables", "--store", lake.uri).returncode == 0
    assert rlake("--store", "nowhere", "tables", "--store", lake.uri).returncode == 0


def test_help_names_every_command(rlake: Command) -> None:
    for args in ([], ["--help"]):
        said = rlake(*args)
        assert said.returncode == 0
        for command in ("sql", "tables", "show", "import", "export", "pipeline", "snapshot"):
            assert command in said.stdout
    assert rlake("--version").stdout.startswith("rlake ")


def test_sql_reads_its_query_from_a_file_or_standard_input(
    rlake: Command, lake: Store, tmp_path: Path
) -> None:
    query = "SELECT rollout_index\nFROM experiences -- both\nORDER BY 1"
    (tmp_path / "q.sql").write_text(query)
    said = rlake("sql", "-f", str(tmp_path / "q.sql"), "--format", "csv")
    assert said.stdout == "rollout_index\n0\n1\n"
    assert rlake("sql", "-", "--format", "csv", stdin=query).stdout == said.stdout
    refused(rlake("sql", "SELECT 1", "-f", "q.sql"), "give the query as an argument", "got both")
    refused(rlake("sql", stdin=""), "no query", "as an argument")
    refused(rlake("sql", "-f", "nosuch.sql"), "cannot read `nosuch.sql`")


def test_sql_prints_csv_json_lines_and_parquet(rlake: Command, lake: Store, tmp_path: Path) -> None:
    query = (
        "SELECT rollout_index, reward, response_text || ', \"so\"' AS text, rewards "
        "FROM experiences ORDER BY 1"
    )
    said = rlake("sql", query, "--format", "jsonl").stdout
    lines = [json.loads(line) for line in said.splitlines()]
    assert lines == json.loads(rlake("sql", query, "--json").stdout)
    said = rlake("sql", query, "--format", "csv").stdout
    [header, first, second] = csv.reader(said.splitlines())
    assert header == ["rollout_index", "reward", "text", "rewards"]
    assert first[:3] == ["0", "1.5", '4, "so"']
    assert second[:2] == ["1", ""]  # NULL is an empty cell
    assert json.loads(first[3]) == lines[0]["rewards"]
    with (tmp_path / "rows.parquet").open("wb") as out:
        subprocess.run(
            [sys.executable, "-m", "rlake.loop.cli", "sql", query, "--format", "parquet"],
            stdout=out,
            check=True,
        )
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == lines


def test_sql_prints_the_views_and_tables_lists_the_macros(rlake: Command, lake: Store) -> None:
    assert rlake("sql", "--print-views").stdout == lake.views_sql()
    listed = rlake("tables").stdout
    assert "pass_at_k(n, c, k)" in listed
    assert "pass_hat_k(n, c, k)" in listed
