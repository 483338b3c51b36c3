"""Import and export as functions: what is filled in, what stays as it was, what comes out."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.files import answer, ask, bring, lines, write

from rlake.store import Store, Task
from rlake.store.errors import ConfigError, ConflictError, QueryError
from rlake.store.files import export
from rlake.store.ids import preference_id
from rlake.store.lineage.experience import of_experience


def stored(store: Store, table: str, *columns: str) -> list[tuple[Any, ...]]:
    return store.scan(table).select(*columns).collect().rows()


def test_all_kinds_of_file_give_the_same_tasks(store: Store, tmp_path: Path) -> None:
    rows = [{"prompt_text": '1, 1\n= "?"', "answer": "2"}, {"prompt_text": "é", "answer": "007"}]
    write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text('prompt_text,answer\n"1, 1\n= ""?""",2\né,007\n')
    (tmp_path / "a.tsv").write_text('answer\tprompt_text\n2\t"1, 1\n= ""?"""\n007\té\n')
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    done = [
        bring(store, "tasks", tmp_path / f"a.{kind}")
        for kind in ("jsonl", "json", "csv", "tsv", "parquet")
    ]
    assert [(d.rows, d.already) for d in done] == [(2, 0), *[(0, 2)] * 4]
    tasks = [Task.ask(r["prompt_text"], r["answer"], taskset="a") for r in rows]
    assert stored(store, "tasks", "task_id") == [(t.task_id,) for t in tasks]


def test_text_that_looks_like_something_else_stays_text(store: Store, tmp_path: Path) -> None:
    uuid = "123e4567-e89b-12d3-a456-426614174000"
    texts = ["2024-01-01", "2024-01-01T10:00:00Z", uuid, "1e5", "true", "null"]
    # a column each: types are inferred by column
    names = ["prompt_text", "response_text", "finish_reason", "drop_reason", "engine", "session_id"]
    path = write(tmp_path / "a.jsonl", dict(zip(names, texts, strict=True)))
    bring(store, "experiences", path)
    assert stored(store, "experiences", *names) == [tuple(texts)]


def test_messages_are_kept_as_they_stand_whatever_other_rows_hold(
    store: Store, tmp_path: Path
) -> None:
    plain = [ask("hi")]
    rich = [{"role": "system", "content": None, "x": [1, {"y": 2}]}, ask("hi")]
    bring(store, "tasks", write(tmp_path / "a.jsonl", {"messages": plain}, {"messages": rich}))
    texts = [json.loads(text) for (text,) in stored(store, "tasks", "messages")]
    assert texts == [plain, rich]
    assert stored(store, "tasks", "task_id")[0] == (Task(messages=plain, taskset="a").task_id,)


def test_structs_of_the_select_become_json_without_the_keys_they_lack(
    store: Store, tmp_path: Path
) -> None:
    rows = [{"q": "a", "meta": {"level": 1}}, {"q": "b", "meta": {"topic": "x"}}]
    sql = """SELECT [{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': q}]
             AS messages, meta AS metadata, 'other' AS taskset FROM input"""
    bring(store, "tasks", write(tmp_path / "a.jsonl", *rows), sql=sql, split="test")
    assert stored(store, "tasks", "prompt_text", "metadata", "taskset", "split") == [
        ("a", '{"level": 1}', "other", "test"),
        ("b", '{"topic": "x"}', "other", "test"),
    ]


def test_chat_data_is_split_into_question_and_answer(store: Store, tmp_path: Path) -> None:
    talk = [ask("2+2="), answer("5"), ask("sure?"), answer("4")]
    rows = [{"messages": talk}, {"messages": [ask("no answer yet")]}]
    path = write(tmp_path / "talks.jsonl", *rows)
    bring(store, "tasks", path, format="chat")
    assert stored(store, "tasks", "prompt_text", "answer") == [
        ("sure?", "4"),
        ("no answer yet", None),
    ]
    bring(store, "experiences", write(path, rows[0]), format="chat")
    columns = ("messages", "prompt_text", "response_text", "num_turns", "source", "reward")
    ((messages, *rest),) = stored(store, "experiences", *columns)
    assert json.loads(messages) == talk
    assert rest == ["sure?", "4", 2, "imported", None]


def test_experiences_without_a_task_bring_it(store: Store, tmp_path: Path) -> None:
    row = {"prompt_text": "2+2=", "answer": "4"}
    tries = [row | {"response_text": "4", "reward": 1}, row | {"response_text": "5", "reward": 0}]
    done = bring(store, "experiences", write(tmp_path / "a.jsonl", *tries))
    assert (done.rows, done.tasks) == (2, 1)
    task = Task.ask("2+2=", "4", taskset="a")
    assert stored(store, "tasks", "task_id") == [(task.task_id,)]
    columns = ("task_id", "group_id", "rollout_index", "reward", "num_turns")
    assert stored(store, "experiences", *columns) == [
        (task.task_id, task.task_id, 0, 1.0, 1),
        (task.task_id, task.task_id, 1, 0.0, 1),
    ]


def test_a_response_alone_takes_the_conversation_of_its_task(store: Store, tmp_path: Path) -> None:
    task = Task(messages=[{"role": "system", "content": "be brief"}, ask("2+2=")])
    store.append("tasks", [task])
    sql = "SELECT t.task_id, a AS response_text FROM input JOIN tasks t ON t.prompt_text = q"
    bring(store, "experiences", write(tmp_path / "a.jsonl", {"q": "2+2=", "a": "4"}), sql=sql)
    ((messages, prompt),) = stored(store, "experiences", "messages", "prompt_text")
    assert json.loads(messages) == [*task.messages, answer("4")]
    assert prompt == "2+2="


def test_equal_rows_of_one_file_are_rows_and_those_of_a_second_import_are_not(
    store: Store, tmp_path: Path
) -> None:
    row = {"prompt_text": "2+2=", "response_text": "4"}
    path = write(tmp_path / "a.jsonl", row, row, row | {"response_text": "5"})
    assert bring(store, "experiences", path).rows == 3
    again = bring(store, "experiences", path)
    assert (again.rows, again.already, again.tasks) == (0, 3, 0)
    ids = [i for (i,) in stored(store, "experiences", "experience_id")]
    assert ids[1] == f"{ids[0]}/2"
    assert all(i.startswith("imported/") for i in ids)


def test_an_import_of_many_batches_is_one_commit(store: Store, tmp_path: Path) -> None:
    rows = [{"prompt_text": f"{i}+{i}=", "reward": None} for i in range(5000)]
    sql = "SELECT prompt_text, 'yes' AS response_text, reward FROM input"
    before = store.versions()
    bring(store, "experiences", write(tmp_path / "a.jsonl", *rows), sql=sql)
    after = store.versions()
    assert {n: after[n] - before[n] for n in after if after[n] != before[n]} == {
        "tasks": 1,
        "experiences": 1,
        "lineage": 1,
    }
    assert store.count("experiences") == 5000


def test_a_row_tells_the_file_that_it_came_from(store: Store, tmp_path: Path) -> None:
    row = {"experience_id": "e1", "prompt_text": "1+1=", "response_text": "2"}
    bring(store, "experiences", write(tmp_path / "a.jsonl", row))
    made = of_experience(store, "e1").pipeline
    assert made is not None
    assert made["source"] == "file a.jsonl"
    bring(store, "experiences", write(tmp_path / "a.jsonl", row))
    assert store.count("lineage") == 1, "a second import stored nothing"


def test_tokens_and_rewards_keep_their_values(store: Store, tmp_path: Path) -> None:
    row = {
        "prompt_text": "2+2=",
        "response_text": "4",
        "token_ids": [1, 2, 3],
        "loss_mask": [False, False, True],
        "logprobs": [0.0, 0.0, -0.5],
        "prompt_length": 2,
        "num_tokens": 3,
        "rewards": [{"name": "format", "value": 1.0}, {"name": "right", "value": None}],
        "created_at": "2024-05-06T07:08:09.123456+00:00",
    }
    bring(store, "experiences", write(tmp_path / "a.jsonl", row))
    (found,) = store.scan("experiences").select(*row).collect().to_dicts()
    assert found.pop("created_at").isoformat() == row.pop("created_at")
    assert found == row


def test_pairs_take_task_and_margin_from_the_two_tries(store: Store, tmp_path: Path) -> None:
    row = {"prompt_text": "2+2="}
    good = row | {"response_text": "4", "reward": 1.0, "experience_id": "good"}
    bad = row | {"response_text": "5", "reward": 0.25, "experience_id": "bad"}
    bring(store, "experiences", write(tmp_path / "a.jsonl", good, bad))
    path = write(tmp_path / "pairs.jsonl", {"chosen_id": "good", "rejected_id": "bad"})
    assert bring(store, "preferences", path).rows == 1
    assert bring(store, "preferences", path).rows == 0
    task = Task.ask("2+2=", taskset="a").task_id
    assert stored(store, "preferences", "task_id", "margin", "source") == [(task, 0.75, "imported")]
    judged = {"chosen_id": "good", "rejected_id": "bad", "source": "judge", "margin": 0.5}
    again = bring(store, "preferences", write(path, judged))
    assert (again.rows, again.already) == (0, 1), "two rows are one pair, whoever compared them"
    named = write(path, judged | {"preference_id": preference_id("good", "bad")})
    with pytest.raises(ConflictError, match="already with other content"):
        bring(store, "preferences", named)


@pytest.fixture
def talks(store: Store, tmp_path: Path) -> Store:
    """Return a store with tries that are plain, of several turns, with tools, and without text."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    start = [ask("2+2="), answer("5"), ask("sure?")]
    rows = [
        {"experience_id": "plain", "prompt_text": "1+1=", "response_text": "2", "reward": 1.0},
        {"experience_id": "yes", "messages": [*start, answer("yes")], "tools": tools},
        {"experience_id": "no", "messages": [*start, answer("no, 4")], "tools": tools},
        {"experience_id": "silent", "prompt_text": "3+3="},
        {"experience_id": "dropped", "prompt_text": "?", "response_text": "8", "drop_reason": "x"},
    ]
    bring(store, "experiences", write(tmp_path / "rows.jsonl", *rows))
    return store


def test_sft_has_a_line_for_each_assistant_turn_and_leaves_out_what_has_none(
    talks: Store, tmp_path: Path
) -> None:
    done = export(talks, "sft", tmp_path / "sft.jsonl")
    assert (done.rows, done.left_out) == (5, 1)
    plain, first, yes, *_ = lines(tmp_path / "sft.jsonl")
    assert plain == {"prompt": [ask("1+1=")], "completion": [answer("2")]}
    assert (first["prompt"], first["completion"]) == ([ask("2+2=")], [answer("5")])
    assert first["tools"] == yes["tools"]
    assert yes["prompt"] == [ask("2+2="), answer("5"), ask("sure?")]
    assert yes["completion"] == [answer("yes")]
    assert yes["tools"][0]["function"]["name"] == "add"


def test_sft_takes_any_select_that_gives_text(talks: Store, tmp_path: Path) -> None:
    sql = """SELECT 'Q: ' || prompt_text AS prompt_text, upper(response_text) AS response_text
             FROM experiences WHERE experience_id = 'yes'"""
    export(talks, "sft", tmp_path / "sft.jsonl", sql=sql)
    assert lines(tmp_path / "sft.jsonl") == [
        {"prompt": [ask("Q: sure?")], "completion": [answer("YES")]}
    ]


def test_dpo_shares_the_prompt_and_leaves_out_pairs_without_a_difference(
    talks: Store, tmp_path: Path
) -> None:
    pairs = [("no", "yes"), ("no", "no"), ("no", "silent"), ("no", "gone"), ("no", "plain")]
    values = ", ".join(f"('{a}', '{b}')" for a, b in pairs)
    sql = f"SELECT * FROM (VALUES {values}) AS pairs(chosen_id, rejected_id)"
    done = export(talks, "dpo", tmp_path / "dpo.jsonl", sql=sql)
    assert (done.rows, done.left_out) == (1, 4)
    (pair,) = lines(tmp_path / "dpo.jsonl")
    assert pair["prompt"] == [ask("2+2="), answer("5"), ask("sure?")]
    assert (pair["chosen"], pair["rejected"]) == ([answer("no, 4")], [answer("yes")])


def test_experiences_are_exported_with_all_columns_or_those_selected(
    talks: Store, tmp_path: Path
) -> None:
    export(talks, "experiences", tmp_path / "a.parquet", where="reward IS NOT NULL")
    whole = pq.read_table(tmp_path / "a.parquet")
    assert whole.column_names == talks.scan("experiences").collect_schema().names()
    assert whole.column("experience_id").to_pylist() == ["plain"]
    sql = "SELECT experience_id, reward, 0 / 0.0 AS odd FROM experiences ORDER BY 1 LIMIT 2"
    export(talks, "experiences", tmp_path / "a.jsonl", sql=sql)
    assert lines(tmp_path / "a.jsonl") == [
        {"experience_id": "dropped", "reward": None, "odd": None},
        {"experience_id": "no", "reward": None, "odd": None},
    ]


def test_an_export_that_fails_half_way_leaves_the_older_file(talks: Store, tmp_path: Path) -> None:
    out = tmp_path / "sft.jsonl"
    out.write_text("older")
    late = "CASE WHEN reward IS NULL THEN error('late') ELSE 'x' END"
    sql = f"SELECT prompt_text, {late} AS response_text FROM experiences"
    with pytest.raises(QueryError, match="late"):
        export(talks, "sft", out, sql=sql)
    assert out.read_text() == "older"
    assert [p.name for p in tmp_path.iterdir() if "sft" in p.name] == ["sft.jsonl"]


def test_only_three_tables_are_imported_into(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got `draws`"):
        bring(store, "draws", write(tmp_path / "a.jsonl", {"run_id": "x"}))
