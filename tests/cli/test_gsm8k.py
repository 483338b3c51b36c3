"""Real input: GSM8K questions and four models' solutions, from files to answers to files."""

import json
from pathlib import Path

import pytest
from support.commands import Command, last_json
from support.files import lines
from support.gsm8k import imports

from rlake.loop.cli import run_command
from rlake.store import Store, Task, connect

PIPELINE = """
name: right_and_wrong
source: {table: experiences, where: "source = 'imported'"}
operators: [drop_flat_groups, {pairs: {strategy: max_min}}]
sink: {table: preferences}
"""


@pytest.fixture(scope="module")
def lake(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a store that holds it all; tests that write put their rows in other tables."""
    place = str(tmp_path_factory.mktemp("gsm8k") / "lake")
    for command in imports(gsm8k):
        assert run_command([*command, "--store", place]) == 0
    return connect(place)


def test_every_question_is_a_task(lake: Store, gsm8k: Path) -> None:
    train, test = lines(gsm8k / "train.jsonl"), lines(gsm8k / "test.jsonl")
    if len(train) > 1000:
        assert len(train) + len(test) == 8792
    stored = lake.scan("tasks").select("split", "prompt_text", "answer").collect().rows()
    asked = [("train", x["question"], x["answer"]) for x in train]
    assert stored == asked + [("test", x["question"], x["answer"]) for x in test]


def test_a_task_that_was_imported_is_the_task_made_in_python(lake: Store, gsm8k: Path) -> None:
    first = lines(gsm8k / "train.jsonl")[0]
    task = Task.ask(first["question"], first["answer"], taskset="gsm8k", split="train")
    row = lake.scan("tasks").head(1).collect().to_dicts()[0]
    by_store = ("created_at", "digest", "lineage_id")
    assert {k: v for k, v in row.items() if k not in by_store} == task.row()


def test_every_solution_is_an_experience_of_its_task(lake: Store, gsm8k: Path) -> None:
    expected = {
        (x["question"], model, tried["solution"], float(tried["is_correct"]))
        for x in lines(gsm8k / "example_model_solutions.jsonl")
        for model, tried in x.items()
        if isinstance(tried, dict)
    }
    rows = lake.sql(
        "SELECT t.prompt_text, e.metadata->>'model', e.response_text, e.reward "
        "FROM experiences e JOIN tasks t USING (task_id) WHERE t.split = 'test'"
    ).fetchall()
    assert (
        len(rows)
        == lake.count("experiences")
        == 4
        * lake.sql("SELECT 1 FROM tasks WHERE split = 'test'")
        .aggregate("count(*)")
        .fetchall()[0][0]
    )
    assert set(rows) == expected


def test_each_models_accuracy_in_sql_is_that_of_the_file(
    lake: Store, gsm8k: Path, rlake: Command
) -> None:
    solved = lines(gsm8k / "example_model_solutions.jsonl")
    models = [name for name, tried in solved[0].items() if isinstance(tried, dict)]
    expected = {m: sum(x[m]["is_correct"] for x in solved) / len(solved) for m in models}
    query = (
        "SELECT metadata->>'model' AS model, avg(reward) AS accuracy FROM experiences GROUP BY 1"
    )
    said = rlake("sql", query, "--json", "--store", lake.uri)
    assert said.returncode == 0
    found = {row["model"]: row["accuracy"] for row in json.loads(said.stdout)}
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_view_groups_shows_four_tries_a_question(lake: Store, gsm8k: Path) -> None:
    questions = len(lines(gsm8k / "test.jsonl"))
    sizes = lake.sql("SELECT num_rollouts, count(*) FROM groups GROUP BY 1").fetchall()
    assert sizes == [(4, questions)]
    rollouts = lake.sql("SELECT rollout_index, count(*) FROM experiences GROUP BY 1 ORDER BY 1")
    assert rollouts.fetchall() == [(i, questions) for i in range(4)]


def test_a_second_import_adds_nothing(lake: Store, gsm8k: Path, rlake: Command) -> None:
    before = {name: (lake.count(name), lake.versions()[name]) for name in ("tasks", "experiences")}
    for command in imports(gsm8k):
        said = rlake(*command, "--store", lake.uri, "--json")
        done = last_json(said)
        assert (said.returncode, done["rows"], done["tasks"]) == (0, 0, 0)
        assert done["already"] == before[done["table"]][0] or done["table"] == "tasks"
    assert before == {n: (lake.count(n), lake.versions()[n]) for n in ("tasks", "experiences")}


def test_a_pipeline_of_right_and_wrong_groups_gives_preferences_and_dpo_lines(
    lake: Store, gsm8k: Path, rlake: Command, tmp_path: Path
) -> None:
    solved = lines(gsm8k / "example_model_solutions.jsonl")
    verdicts = [{v["is_correct"] for v in x.values() if isinstance(v, dict)} for x in solved]
    mixed = sum(found == {True, False} for found in verdicts)
    (tmp_path / "pairs.yaml").write_text(PIPELINE)
    assert rlake("pipeline", "explain", "pairs.yaml").returncode == 0
    said = rlake("pipeline", "run", "pairs.yaml", "--store", lake.uri, "--json")
    assert last_json(said)["rows_out"] == mixed
    assert lake.count("preferences") == mixed

    assert rlake("export", "dpo", "--out", "dpo.jsonl", "--store", lake.uri).returncode == 0
    verdict = {
        (x["question"], tried["solution"]): tried["is_correct"]
        for x in solved
        for tried in x.values()
        if isinstance(tried, dict)
    }
    pairs = lines(tmp_path / "dpo.jsonl")
    assert len(pairs) == mixed
    for pair in pairs:
        (asked,), (chosen,), (rejected,) = pair["prompt"], pair["chosen"], pair["rejected"]
        assert (asked["role"], chosen["role"], rejected["role"]) == ("user", *["assistant"] * 2)
        assert verdict[asked["content"], chosen["content"]] is True
        assert verdict[asked["content"], rejected["content"]] is False


def test_an_sft_export_holds_the_right_solutions_and_no_other(
    lake: Store, gsm8k: Path, rlake: Command, tmp_path: Path
) -> None:
    said = rlake(
        "export", "sft", "--out", "right.jsonl", "--where", "reward >= 1", "--store", lake.uri
    )
    assert said.returncode == 0
    right = [
        (x["question"], tried["solution"])
        for x in lines(gsm8k / "example_model_solutions.jsonl")
        for tried in x.values()
        if isinstance(tried, dict) and tried["is_correct"]
    ]
    rows = lines(tmp_path / "right.jsonl")
    assert all(list(row) == ["prompt", "completion"] for row in rows)
    texts = [(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in rows]
    assert sorted(texts) == sorted(right)
    assert f"wrote {len(right):,} rows" in said.stdout


def test_exported_experiences_come_back_as_the_same_rows(
    lake: Store, rlake: Command, tmp_path: Path
) -> None:
    of_import = ("lineage_id", "digest")  # which is over the former, too
    stored = lake.scan("experiences").drop(of_import).sort("experience_id").collect()
    for name in ("all.parquet", "all.jsonl"):
        assert rlake("export", "experiences", "--out", name, "--store", lake.uri).returncode == 0
        said = rlake("import", "experiences", name, "--store", tmp_path / f"copy-of-{name}")
        assert said.returncode == 0, said.stderr
        copy = connect(tmp_path / f"copy-of-{name}").scan("experiences")
        assert copy.drop(of_import).sort("experience_id").collect().equals(stored)
