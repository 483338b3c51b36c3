"""What is wrong is refused with one clear line and the right exit code; nothing is half-written."""

import json
from pathlib import Path

import lance
import pytest
from support.commands import Command, last_json, refused

from rlake.loop.cli import app
from rlake.loop.cli.program import FORMER
from rlake.store import Store, Task, connect
from rlake.store.errors import ConfigError
from rlake.store.schema import SCHEMA_VERSION, TABLES


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def rows(*values: object) -> str:
    return "".join(json.dumps(v) + "\n" for v in values)


GOOD = {"prompt_text": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("missing.jsonl", None, "`missing.jsonl` does not exist"),
        ("empty.jsonl", "", "`empty.jsonl` is empty"),
        ("blank.jsonl", "\n\n", "`blank.jsonl` has no rows"),
        ("empty.json", "[]", "`empty.json` has no rows"),
        ("header.csv", "prompt_text,answer\n", "`header.csv` has no rows"),
        (
            "bad.jsonl",
            rows(GOOD) + '{"prompt_text": \n',
            "`bad.jsonl` line 2 is not JSON: expecting",
        ),
        ("list.jsonl", rows(GOOD, GOOD, [1]), "line 3 is a JSON list, expected an object"),
        ("half.jsonl", '{"prompt_text": "\\ud83d"}\n', "line 1 holds half a surrogate pair"),
        ("bad.json", '[{"prompt_text": "a"},\n{"prompt_text"]', "cannot read `bad.json` as json"),
        ("bad.csv", "prompt_text,answer\na,b\nc,d,e\n", "line 3: Expected Number of Columns: 2"),
        ("quote.csv", 'prompt_text,answer\na,"b\nc,d\n', "Value with unterminated quote"),
        ("bad.parquet", "PAR1 junk PAR1", "cannot read `bad.parquet` as parquet"),
        ("tasks.txt", "x", "cannot tell what kind of file `tasks.txt` is"),
        ("typo.jsonl", rows({"promt_text": "a"}), "did you mean `prompt_text`?"),
        ("other.jsonl", rows({"zzz": 1}), "`zzz` is not a column of `tasks`"),
        (
            "number.jsonl",
            rows({"prompt_text": 5}),
            "`prompt_text` of `tasks` must be string, got int64",
        ),
        (
            "nothing.jsonl",
            rows({"answer": "4"}),
            "row 1 of `nothing.jsonl`, as selected: a task needs",
        ),
        ("null.jsonl", rows(GOOD, {"answer": "4"}), "row 2 of `null.jsonl`"),
        ("talk.jsonl", rows({"messages": [{"content": "a"}]}), "objects with a `role`"),
        ("meta.jsonl", rows(GOOD | {"metadata": [1]}), "`metadata` must be an object, got [1]"),
    ],
)
def test_a_file_that_cannot_be_tasks_is_refused(
    rlake: Command, lake: Store, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        write(name, text)
    before = lake.versions()
    refused(rlake("import", "tasks", name), words)
    assert lake.versions() == before


def test_the_number_of_bad_lines_is_said_and_the_store_not_even_made(
    rlake: Command, tmp_path: Path
) -> None:
    write("bad.jsonl", "{\n" + rows(GOOD) + "}\n")
    refused(rlake("import", "tasks", "bad.jsonl"), "line 1 ", "(2 such lines)", "`--skip-invalid`")
    assert not (tmp_path / "lake").exists()


def test_bad_lines_are_left_out_and_counted_when_asked(rlake: Command, lake: Store) -> None:
    write("bad.jsonl", "{\n" + rows(GOOD) + "[]\n\n" + rows({"prompt_text": "3+3="}))
    said = rlake("import", "tasks", "bad.jsonl", "--skip-invalid", "--json")
    done = last_json(said)
    assert (said.returncode, done["rows"], done["skipped"], done["input_rows"]) == (0, 2, 2, 2)
    assert lake.scan("tasks").collect()["prompt_text"].to_list() == ["2+2=", "1+1=", "3+3="]


def test_skip_invalid_leaves_out_rows_of_every_kind_of_file(rlake: Command, lake: Store) -> None:
    write("tasks.csv", "prompt_text,metadata\na,{}\nb,{broken\n")
    said = rlake("import", "tasks", "tasks.csv", "--skip-invalid", "--json")
    done = last_json(said)
    assert (done["rows"], done["skipped"]) == (1, 1)
    assert done["rejected_to"] == "tasks.csv.rejected.jsonl"
    assert lake.count("tasks") == 2


TRIED = {"prompt_text": "2+2=", "response_text": "4"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            rows(TRIED, TRIED | {"reward": float("nan")}),
            "row 2 of `tries.jsonl`, as selected: column `reward`",
        ),
        (rows(TRIED | {"reward": float("inf")}), "holds NaN or infinity, expected a finite number"),
        (rows(TRIED | {"reward": "high"}), "cast it in the SELECT: `reward::DOUBLE AS reward`"),
        (rows(TRIED | {"source": "expret"}), "did you mean `expert`?"),
        (rows({"response_text": "4"}), "needs `task_id`, `prompt_text` or `messages`"),
        (rows({"task_id": "zz", "response_text": "4"}), "task 'zz' is not stored"),
        (rows(TRIED | {"token_ids": [1, 2], "logprobs": [0.0]}), "one for each of `token_ids`"),
        (rows(TRIED | {"priority": -1.0}), "negative number"),
        (rows(TRIED | {"rollout_index": 0.5}), "column `rollout_index` must be int64, got 0.5"),
        (rows({"messages": [{"role": "assistant", "content": "4"}]}), "an answer and no question"),
    ],
)
def test_experiences_that_do_not_fit_are_refused_and_bring_no_task(
    rlake: Command, lake: Store, text: str, words: str
) -> None:
    write("tries.jsonl", text)
    before = lake.versions()
    refused(rlake("import", "experiences", "tries.jsonl"), words)
    assert lake.versions() == before


def test_a_row_that_is_wrong_is_named_also_far_down_the_file(rlake: Command, lake: Store) -> None:
    many = [TRIED | {"reward": float("nan") if i == 2500 else 0.5} for i in range(3000)]
    write("tries.jsonl", rows(*many))
    refused(rlake("import", "experiences", "tries.jsonl"), "row 2501 of `tries.jsonl`")
    assert lake.count("experiences") == 0
    assert lake.count("tasks") == 1


def test_the_id_of_a_stored_row_with_other_content_is_refused(rlake: Command, lake: Store) -> None:
    write("one.jsonl", rows(TRIED | {"experience_id": "a", "reward": 1.0}))
    write("two.jsonl", rows(TRIED | {"experience_id": "a", "reward": 0.0}))
    assert rlake("import", "experiences", "one.jsonl").returncode == 0
    refused(rlake("import", "experiences", "two.jsonl"), "`experience_id` 'a' is in `experiences`")
    assert lake.scan("experiences").collect()["reward"].to_list() == [1.0]


@pytest.mark.parametrize(
    ("chosen", "rejected", "words"),
    [
        ("a", "zz", "`rejected_id` 'zz' is not stored"),
        ("a", "a", "are both 'a'"),
        ("a", "b", "are not two rollouts of task"),
        ("a", None, "`rejected_id` is missing"),
    ],
)
def test_a_pair_must_be_two_stored_tries_at_one_task(
    rlake: Command, lake: Store, chosen: str, rejected: str | None, words: str
) -> None:
    other = {"prompt_text": "3+3=", "response_text": "6", "experience_id": "b"}
    write("tries.jsonl", rows(TRIED | {"experience_id": "a"}, other))
    assert rlake("import", "experiences", "tries.jsonl").returncode == 0
    write("pairs.jsonl", rows({"chosen_id": chosen, "rejected_id": rejected}))
    refused(rlake("import", "preferences", "pairs.jsonl"), words)
    assert lake.count("preferences") == 0


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("SELEC prompt_text FROM input", "the SELECT over `input` does not parse"),
        (
            "SELECT promt_text FROM input",
            "column `promt_text` that is not there; did you mean `prompt_text`?",
        ),
        ("SELECT prompt_text FROM inputs", "no table or view `inputs`; did you mean `input`?"),
        ("SELECT prompt_text FROM input WHERE false", "gave no rows, of 1 in the file"),
        (
            "SELECT prompt_text FROM input; SELECT 1",
            "one SELECT over `input`, got SELECT then SELECT",
        ),
        ("COPY input TO 'stolen.csv'", "one SELECT over `input`, got COPY"),
        ("EXPLAIN ANALYZE COPY input TO 'tasks.jsonl'", "got EXPLAIN"),
        ("SELECT content AS prompt_text FROM read_text('/etc/passwd')", "no other file"),
        ("SELECT * FROM '/etc/passwd'", "no table or view"),
        ("SELECT prompt_text, 5 AS answer FROM input", "`answer::VARCHAR AS answer`"),
        ("SELECT prompt_text::INT AS prompt_text FROM input", "must be string, got int32"),
        (
            "SELECT prompt_text, (prompt_text::INT)::VARCHAR AS answer FROM input",
            "Could not convert",
        ),
    ],
)
def test_a_select_that_is_wrong_imports_nothing(
    rlake: Command, lake: Store, select: str, words: str
) -> None:
    write("tasks.jsonl", rows(GOOD))
    before = lake.versions()
    refused(rlake("import", "tasks", "tasks.jsonl", "--sql", select), words)
    assert lake.versions() == before
    assert sorted(p.name for p in Path().iterdir()) == ["lake", "tasks.jsonl"]
    assert Path("tasks.jsonl").read_text() == rows(GOOD)


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("SELEC prompt_text FROM input", "does not parse"),
        ("SELECT prompt_text AS promt_text FROM input", "`prompt_text`? Map the file with `--sql"),
        ("SELECT prompt_text AS zzz FROM input", "`taskset` and others; map the file with `--sql"),
    ],
)
def test_a_select_that_is_wrong_makes_no_store(rlake: Command, select: str, words: str) -> None:
    write("tasks.jsonl", rows(GOOD))
    refused(rlake("import", "tasks", "tasks.jsonl", "--sql", select), words)
    assert [p.name for p in Path().iterdir()] == ["tasks.jsonl"]


def test_an_import_that_makes_the_store_may_join_its_empty_tables(
    rlake: Command, tmp_path: Path
) -> None:
    write("tasks.jsonl", rows(GOOD, GOOD | {"prompt_text": "it's 1+2="}))
    select = "SELECT * FROM input WHERE prompt_text NOT IN (SELECT prompt_text FROM tasks)"
    assert rlake("import", "tasks", "tasks.jsonl", "--sql", select).returncode == 0
    assert connect(tmp_path / "lake").count("tasks") == 2


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELEC 1", "does not parse"),
        ("SELECT rewrd FROM experiences", "did you mean `reward`?"),
        ("SELECT * FROM taskz", "did you mean `tasks`?"),
        ("DELETE FROM tasks", "read with one SELECT, got DELETE"),
        ("INSERT INTO tasks SELECT * FROM tasks", "got INSERT"),
        ("DROP TABLE tasks", "got DROP"),
        ("COPY tasks TO 'stolen.csv'", "got COPY"),
        ("SELECT * FROM read_text('/etc/passwd')", "may only read the store"),
        ("SELECT prompt_text::INT FROM tasks", "Could not convert string '2+2='"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_sql_that_does_not_parse_or_tries_to_write_is_refused(
    rlake: Command, lake: Store, query: str, words: str, options: list[str]
) -> None:
    said = rlake("sql", query, *options)
    refused(said, words)
    assert lake.count("tasks") == 1
    assert [p.name for p in Path().iterdir()] == ["lake"]


def test_the_past_must_have_a_name(rlake: Command, lake: Store) -> None:
    assert rlake("snapshot", "create", "before").returncode == 0
    lake.append("tasks", [Task.ask("3+3=", "6")])
    count = "SELECT count(*) AS n FROM tasks"
    assert json.loads(rlake("sql", count, "--json", "--at", "before").stdout) == [{"n": 1}]
    assert json.loads(rlake("sql", count, "--json").stdout) == [{"n": 2}]
    refused(rlake("sql", count, "--at", "befor"), "no snapshot `befor`; did you mean `before`?")
    refused(rlake("snapshot", "create", "before"), "`before` exists already")


@pytest.mark.parametrize(
    "command",
    [["tables"], ["sql", "SELECT 1"], ["show", "x"], ["export", "sft", "--out", "x.jsonl"]],
    ids=lambda c: c[0],
)
def test_reading_makes_no_store(rlake: Command, tmp_path: Path, command: list[str]) -> None:
    refused(rlake(*command), "no store at", "`--store`")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_no_store_is_left_alone(rlake: Command, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    write("home/letter.txt", "dear")
    write("tasks.jsonl", rows(GOOD))
    for store, words in (
        ("home", "is not a store: it holds 1 other"),
        ("tasks.jsonl", "is a file"),
    ):
        refused(rlake("import", "tasks", "tasks.jsonl", "--store", store), words)
        refused(rlake("tables", "--store", store), words)
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"rlake.schema_version": str(SCHEMA_VERSION + 1)}, f"has schema {SCHEMA_VERSION + 1}"),
        ({}, "holds tables that rlake did not make"),
    ],
)
def test_a_store_of_a_newer_schema_is_refused(
    rlake: Command, tmp_path: Path, metadata: dict[str, str], words: str
) -> None:
    for name, table in TABLES.items():
        empty = table.schema.with_metadata(metadata).empty_table()
        lance.write_dataset(empty, str(tmp_path / "lake" / f"{name}.lance"))
    write("tasks.jsonl", rows(GOOD))
    refused(rlake("tables"), words)
    refused(rlake("import", "tasks", "tasks.jsonl"), words)
    assert lance.dataset(str(tmp_path / "lake" / "tasks.lance")).count_rows() == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["impotr"], "Did you mean 'import'?"),
        (["pipeline", "p.yaml"], "'p.yaml'. Did you mean `rlake pipeline run p.yaml`?"),
        (["import", "task", "x.jsonl"], "is not one of 'tasks', 'experiences', 'preferences'"),
        (["sql", " "], "no query; give it as an argument"),
        (["tables", "--sotre", "x"], "--store"),
        (["tables", "experience"], "did you mean `experiences`?"),
        (["show", "nothing"], "has the id `nothing`"),
        (["import", "tasks", "tasks.jsonl", "--format", "gsmk8"], "did you mean `gsm8k`?"),
        (
            ["import", "preferences", "tasks.jsonl", "--format", "gsm8k"],
            "gives tasks and experiences",
        ),
        (["import", "tasks", "tasks.jsonl", "--format", "chat", "--sql", "SELECT 1"], "`--sql`"),
        (["import", "preferences", "tasks.jsonl", "--split", "test"], "preferences have none"),
        (["export", "sft", "--out", "x.csv"], "`sft` is written to `.jsonl`, "),
        (["export", "sft", "--out", "no/x.jsonl"], "`no` does not exist"),
        (["export", "sft", "--out", "x.jsonl", "--where", "rewrad > 0"], "did you mean `reward`?"),
        (["export", "sft", "--out", "x.jsonl", "--where", "true"], "no rows to export as sft"),
        (["export", "dpo", "--out", "x.jsonl"], "no rows to export as dpo"),
        (["export", "sft", "--out", "x.jsonl", "--sql", "SELECT 1 AS a"], "must give `messages`"),
        (["export", "dpo", "--out", "x.jsonl", "--sql", "SELECT 1 AS a"], "must give `chosen_id`"),
        (["export", "sft", "--out", "x.jsonl", "--sql", "SELECT 1", "--where", "true"], "exclude"),
        (["pipeline", "run", "missing.yaml"], "missing.yaml"),
    ],
)
def test_a_command_used_wrongly_says_how_to_use_it(
    rlake: Command, lake: Store, args: list[str], words: str
) -> None:
    write("tasks.jsonl", rows(GOOD))
    before = lake.versions()
    refused(rlake(*args), words)
    assert lake.versions() == before
    assert sorted(p.name for p in Path().iterdir()) == ["lake", "tasks.jsonl"]


@pytest.mark.parametrize("former", FORMER)
def test_what_was_renamed_names_its_new_name(rlake: Command, former: str) -> None:
    *path, old = former.split()
    refused(rlake(*path, old), f"`{old}` is called `{FORMER[former]}` (see")
    now = [*path, FORMER[former]]
    help_words = now if old[0] != "-" else path
    assert FORMER[former] in rlake(*help_words, "--help").stdout


def test_explorers_are_added_only_to_a_run_on_ray(rlake: Command) -> None:
    said = rlake("explore", "grpo_arithmetic", "--add-explorers", 1)
    refused(said, "has no `ray` section")


# damage


@pytest.mark.parametrize(
    "command",
    [
        ["sql", "SELECT max(response_text) FROM experiences"],
        ["sql", "SELECT max(response_text) FROM experiences", "--json"],
        ["show", "a/0"],
        ["search", "four"],
        ["export", "sft", "--out", "sft.jsonl"],
        ["rescore", "--reward", "exact_match"],
        ["lineage", "--experience", "a/0"],
        ["branch", "merge", "trial"],
        ["maintain"],
    ],
    ids=" ".join,
)
def test_a_file_that_is_gone_is_a_failure_that_is_named(
    rlake: Command, lake: Store, command: list[str]
) -> None:
    task = lake.scan("tasks").collect()["task_id"][0]
    lake.append(
        "experiences",
        [
            {"experience_id": "a/0", "task_id": task, "group_id": "a", "rollout_index": 0,
             "source": "human", "prompt_text": "2+2=", "response_text": "four"}
        ],
    )  # fmt: skip
    lake.branch("trial")
    for path in Path("lake/experiences.lance/data").iterdir():
        path.unlink()
    said = rlake(*command)
    refused(said, "`experiences`: Not found: ", ".lance; `rlake doctor` says", code=1)


def test_a_package_that_cannot_be_loaded_is_not_called_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:  # as transformers does
            raise ModuleNotFoundError("Could not import module 'PreTrainedModel'.") from error

    monkeypatch.setattr(app, "import_module", load)
    with pytest.raises(ConfigError, match=r"`rlake\[train\]` cannot be loaded: operator torchv"):
        app.heavy("run")
