"""Exports: rows of a pipeline, labels, margins, plain text, and why a row is left out."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from support.builders import experiences, rows, task
from support.files import lines

from rlake.loop.cli import run_command
from rlake.operators import kto_labels, pairs, top_k
from rlake.pipelines import Pipeline, Table
from rlake.store import Store
from rlake.store.errors import ConfigError, InputError, QueryError
from rlake.store.files import export

REWARDS = (1.0, 0.0, 0.5, None, 1.0, 1.0, 0.0, 0.25)


@pytest.fixture
def tried(store: Store) -> Store:
    """Return a store with two groups of tries, as text."""
    store.append("tasks", [task(0), task(1)])
    made = rows(experiences(8, reward=REWARDS)).with_columns(
        prompt_text=pl.format("{}?", "group_id"),
        response_text=pl.format("reply {}", "rollout_index"),
    )
    store.append("experiences", made)
    return store


def said(line: dict[str, Any]) -> str:
    return line["prompt"][0]["content"] + line["completion"][0]["content"]


def test_the_rows_that_a_pipeline_returns_are_exported(
    tried: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = Pipeline(name="best", source=Table("experiences"), operators=[top_k()])
    kept = best.run(tried).rows
    assert kept is not None
    done = export(tried, "sft", tmp_path / "a.jsonl", rows=kept.to_arrow())
    assert (done.rows, sorted(map(said, lines(tmp_path / "a.jsonl")))) == (
        2,
        ["g000?reply 0", "g001?reply 0"],
    )
    monkeypatch.chdir(tmp_path)
    chain = "name: best\nsource: {table: experiences}\noperators: [top_k]\n"
    Path("best.yaml").write_text(chain)
    command = ["export", "sft", "--pipeline", "best.yaml", "--out", "b.jsonl"]
    for _ in range(2):  # rows are returned again when nothing is new
        assert run_command([*command, "--store", tried.uri]) == 0
        assert Path("b.jsonl").read_text() == Path("a.jsonl").read_text()
    Path("best.yaml").write_text(chain + "sink: {file: x.parquet}\n")
    assert run_command([*command, "--store", tried.uri]) == 2


def test_pairs_of_a_pipeline_go_out_with_their_margins(tried: Store, tmp_path: Path) -> None:
    chain = Pipeline(
        name="all", source=Table("experiences"), operators=[pairs(strategy="all", min_margin=0.5)]
    )
    made = chain.run(tried).rows
    assert made is not None
    done = export(tried, "reward", tmp_path / "a.jsonl", rows=made.to_arrow(), as_text=True)
    told = [(x["prompt"], x["chosen"], x["rejected"], x["margin"]) for x in lines(done.path)]
    assert ("g000?", "reply 0", "reply 1", 1.0) in told
    assert ("g000?", "reply 2", "reply 1", 0.5) in told
    assert (done.rows, done.left_out) == (made.height, 0)
    export(tried, "reward", tmp_path / "a.parquet", rows=made.to_arrow())
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["prompt", "chosen", "rejected", "margin"]
    assert table.column("margin").to_pylist() == made["margin"].to_list()


def test_pairs_go_to_a_reward_model_without_margins_when_one_has_none(
    tried: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried.append(
        "preferences",
        pl.DataFrame(
            {
                "preference_id": ["p"],
                "task_id": [task(0).task_id],
                "chosen_id": ["g000/00"],
                "rejected_id": ["g000/01"],
                "source": ["human"],
            }
        ),
    )
    chain = Pipeline(
        name="more",
        source=Table("experiences", where="group_id = 'g001'"),
        operators=[pairs(strategy="all", min_margin=0.5)],
        sink=Table("preferences"),
    )
    chain.run(tried)
    assert (
        run_command(["export", "reward", "--store", tried.uri, "--out", str(tmp_path / "b.jsonl")])
        == 0
    )
    told = capsys.readouterr().out
    assert "no line has a margin: missing in 1 pair" in told
    without = lines(tmp_path / "b.jsonl")
    assert (len(without), {"margin"} & set().union(*without)) == (5, set())
    some = export(tried, "reward", tmp_path / "c.jsonl", where="margin IS NOT NULL")
    assert [x["margin"] for x in lines(some.path)] == [1.0, 0.75, 1.0, 0.75]
    only = "SELECT chosen_id, rejected_id FROM preferences"
    assert export(tried, "reward", tmp_path / "d.jsonl", sql=only).rows == 5


def test_labels_are_a_condition_over_whole_groups(tried: Store, tmp_path: Path) -> None:
    mean = "reward > avg(reward) OVER (PARTITION BY group_id)"
    done = export(
        tried, "kto", tmp_path / "a.jsonl", label=mean, where="reward <= 0.5 OR reward IS NULL"
    )
    # of all rows of the first group the mean is 0.5, of those that are chosen it would be 0.25
    assert [(said(x), x["label"]) for x in lines(done.path)] == [
        ("g000?reply 1", False),
        ("g000?reply 2", False),
        ("g001?reply 2", False),
        ("g001?reply 3", False),
    ]
    assert (done.why, done.kto_weights) == ({"its label is NULL": 1}, None)


def test_labels_that_an_operator_made_are_a_side_column(tried: Store, tmp_path: Path) -> None:
    chain = Pipeline(
        name="labels",
        source=Table("experiences"),
        operators=[kto_labels(by="group_mean")],
        sink=Table("experience_values"),
    )
    chain.run(tried)
    done = export(
        tried, "kto", tmp_path / "a.jsonl", with_columns=["derived:desirable"], label="desirable"
    )
    assert [(said(x)[-1], x["label"]) for x in lines(done.path)] == [
        ("0", True),
        ("1", False),
        ("0", True),
        ("1", True),
        ("2", False),
        ("3", False),
    ]
    assert done.why == {"its label is NULL": 2}
    assert (done.labels, done.kto_weights) == ({True: 3, False: 3}, (1.0, 1.0))


def test_weights_of_two_unequal_classes_balance_them(
    tried: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = export(tried, "kto", tmp_path / "a.jsonl")
    assert done.labels == {True: 5, False: 2}
    assert done.kto_weights == (1.0, 2.5)
    command = ["export", "kto", "--store", tried.uri, "--out", str(tmp_path / "b.jsonl")]
    assert run_command(command) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "left out: 1 row (its label is NULL)",
        "5 desirable and 2 undesirable rows weigh the same in TRL with desirable_weight=1, "
        "undesirable_weight=2.5",
    ]
    assert run_command([*command, "--label", "reward > 0.9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["why"]) == (7, {"its label is NULL": 1})
    assert (told["desirable_weight"], told["undesirable_weight"]) == (4 / 3, 1.0)


def test_plain_text_is_one_question_and_one_answer(store: Store, tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    talks = {
        "plain": [asked, answered],
        "system": [{"role": "system", "content": "s"}, asked, answered],
        "turns": [asked, answered, asked, answered],
        "call": [asked, call],
        "parts": [asked, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
    }
    made = rows(experiences(6, reward=1.0)).with_columns(
        experience_id=pl.Series([*talks, "tools"]),
        messages=pl.Series([json.dumps(t) for t in [*talks.values(), [asked, answered]]]),
        tools=pl.Series([None] * 5 + ['[{"type": "function"}]'], dtype=pl.String),
    )
    store.append("experiences", made)
    done = export(store, "sft", tmp_path / "a.jsonl", as_text=True)
    assert lines(done.path) == [{"prompt": "q", "completion": "a"}]
    assert done.why == {
        "plain text is one question of a user and one answer": 2,
        "a message of it is more than text": 2,
        "plain text has no tools": 1,
    }
    assert export(store, "sft", tmp_path / "b.jsonl").rows == 7, "one has two answers"
    with pytest.raises(ConfigError, match="`chat` has no form in plain text"):
        export(store, "chat", tmp_path / "c.jsonl", as_text=True)


def test_each_pair_that_is_none_says_why(store: Store, tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    other = [{"role": "user", "content": "p"}, answered]
    talks = [[asked, answered], [asked, answered], other, [asked, answered, asked, answered]]
    made = rows(experiences(5, reward=1.0)).with_columns(
        experience_id=pl.Series(list("abcde")),
        messages=pl.Series([*map(json.dumps, talks), None], dtype=pl.String),
        response_text=pl.lit(None, pl.String),
    )
    store.append("experiences", made)
    values = ", ".join(f"('a', '{name}')" for name in ("b", "c", "d", "e", "gone"))
    sql = f"SELECT * FROM (VALUES {values}) AS pairs(chosen_id, rejected_id)"
    with pytest.raises(InputError) as caught:
        export(store, "dpo", tmp_path / "a.jsonl", sql=sql)
    for reason in (
        "its answers are equal",
        "its answers are to different questions",
        "one of its answers is the beginning of the other",
        "it has no question and answer in text",
        "its experiences are not both stored",
    ):
        assert f"1 left out: {reason}" in str(caught.value)


def test_no_question_of_a_user_is_in_an_answer_that_dpo_trains_on(
    store: Store, tmp_path: Path
) -> None:
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    other = {"role": "assistant", "content": "b"}
    talks = {
        "a": [asked, answered, {"role": "user", "content": "left"}, answered],
        "b": [asked, answered, {"role": "user", "content": "right"}, answered],
        "c": [asked, other, {"role": "user", "content": "left"}, answered],
        "d": [asked, answered],
        "e": [asked, other, {"role": "tool", "content": "1"}],
    }
    made = rows(experiences(len(talks), reward=1.0)).with_columns(
        experience_id=pl.Series(list(talks)),
        messages=pl.Series([*map(json.dumps, talks.values())]),
        response_text=pl.lit(None, pl.String),
    )
    store.append("experiences", made)
    sql = "SELECT * FROM (VALUES ('a', 'b'), ('a', 'c'), ('d', 'e')) AS p(chosen_id, rejected_id)"
    done = export(store, "dpo", tmp_path / "a.jsonl", sql=sql)
    assert done.why == {
        "its conversations part at a question, not at an answer": 1,
        "a user turn follows one of its answers, and would be trained on": 1,
    }
    [line] = lines(done.path)
    assert (line["prompt"], line["chosen"]) == ([asked], [answered])
    assert line["rejected"] == talks["e"][1:]
    done = export(store, "reward", tmp_path / "b.jsonl", sql=sql)
    assert (done.rows, done.left_out, done.without_margin) == (2, 1, 3)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"what": "sft", "label": "true"}, "`--label` is for kto; sft has no labels"),
        ({"what": "kto", "sql": "SELECT 1", "label": "true"}, "a SELECT names its own columns"),
        ({"what": "dpo", "with_columns": ["score:x"]}, "leave `--side-columns` out"),
        ({"what": "kto", "label": "rewrad > 0"}, "did you mean `reward`"),
        ({"what": "kto", "label": "response_text"}, "Could not convert string"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tried: Store, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises((ConfigError, QueryError), match=told):
        export(tried, options.pop("what"), tmp_path / "a.jsonl", **options)
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_equal_lines_are_counted_and_may_be_written_once(
    tried: Store, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = rows(experiences(4, reward=1.0, run_id="again")).with_columns(
        experience_id=pl.format("again/{}", "rollout_index"),
        prompt_text=pl.lit("g000?"),
        response_text=pl.format("reply {}", pl.col("rollout_index") % 2),
    )
    tried.append("experiences", twice)
    done = export(tried, "kto", tmp_path / name, where="reward = 1")
    assert (done.rows, done.repeated, done.labels) == (7, 3, {True: 7})
    done = export(tried, "kto", tmp_path / name, where="reward = 1", distinct=True)
    assert (done.rows, done.repeated, done.labels) == (4, 3, {True: 4})
    out = str(tmp_path / f"b{name}")
    command = ["export", "sft", "--out", out, "--where", "reward = 1", "--store", tried.uri]
    assert run_command(command) == 0
    assert "3 lines equal to an earlier one: `--distinct` writes each once" in (
        capsys.readouterr().out
    )
    assert run_command([*command, "--distinct"]) == 0
    assert "wrote 4 rows" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="every experience has its own id"):
        export(tried, "experiences", tmp_path / "c.jsonl", distinct=True)
