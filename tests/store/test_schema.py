"""The declared columns are what is stored, and what the records say."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from support.builders import rows

from rlake.store import Experience, Store, Task, connect
from rlake.store.errors import NotAStoreError, SchemaError
from rlake.store.schema import PER_TOKEN, SCHEMA_VERSION, TABLES, describe

FULL = Experience(
    task_id="t",
    token_ids=[1, 2, 3],
    tokenizer="digest",
    digests=["of the weights"],
    engine="transformers",
    session_id="s",
    timings={"total": 0.5},
    loss_mask=[False, True, True],
    logprobs=[0.0, -0.5, -0.25],
    prompt_length=1,
    messages=[
        {"role": "user", "content": 'Grüße, "世界" 🌍\n\x00'},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "args": {"a": [1, {}]}}]},
    ],
    tools=[{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}],
    prompt_text="Grüße",
    response_text="",
    finish_reason="stop",
    drop_reason="no reason",
    policy_version=3,
    segments=[{"policy_version": 3, "num_tokens": 1}, {"policy_version": 4, "num_tokens": 1}],
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.05,
    sampling={"repetition_penalty": 1.1},
    reward=0.5,
    rewards={"exact": 1.0, "format": None},
    token_rewards=[0.0, 0.0, 0.5],
    advantage=-0.5,
    priority=2.0,
    teacher_logprobs=[0.0, -1.0, -2.0],
    routed_experts=[[0, 3], [300, 1], []],
    metrics={"seconds": 0.25},
    metadata={"nested": {"deep": [1, None, "é"]}},
    num_turns=1,
    source="served",
    parent_id="p",
    experience_id="e",
    group_id="g",
    rollout_index=2,
    run_id="r",
    batch=7,
    group_index=2,
)


def test_the_records_have_the_declared_columns() -> None:
    derived = {"created_at", "lineage_id", "digest"}
    assert set(TABLES["experiences"].names) == {f.name for f in fields(Experience)} | derived | {
        "num_tokens"
    }
    assert set(TABLES["tasks"].names) == {f.name for f in fields(Task)} | derived | {
        "task_id",
        "prompt_text",
    }
    assert set(FULL.row()) == set(TABLES["experiences"].names) - derived
    assert set(Task.ask("?").row()) == set(TABLES["tasks"].names) - derived


def test_the_full_example_leaves_nothing_out() -> None:
    assert [f.name for f in fields(FULL) if getattr(FULL, f.name) is None] == []


@pytest.mark.parametrize("name", TABLES)
def test_what_is_stored_has_the_declared_columns(store: Store, name: str) -> None:
    stored = store.dataset(name).schema
    assert stored.equals(TABLES[name].schema)
    assert (stored.metadata or {})[b"rlake.schema_version"] == str(SCHEMA_VERSION).encode()


def test_every_column_has_a_note_and_every_key_is_a_column() -> None:
    for table, column, kind, note in describe():
        assert note.strip(), f"{table}.{column} says nothing"
        assert kind
    for name, table in TABLES.items():
        assert table.row
        assert set(table.key) <= set(table.names), name
        assert len(set(table.names)) == len(table.names), name


def test_per_token_columns_are_lists() -> None:
    kinds = {c.name: c.type for c in TABLES["experiences"].columns}
    assert all(pa.types.is_list(kinds[name]) for name in ("token_ids", *PER_TOKEN))


def test_an_experience_comes_back_as_it_was(store: Store) -> None:
    store.append("experiences", [FULL])
    [row] = store.scan("experiences").collect().to_dicts()
    assert Experience.from_row(row) == FULL
    assert (row["num_tokens"], row["created_at"].tzinfo is not None) == (3, True)


def test_what_an_experience_lacks_is_null_and_comes_back_as_nothing(store: Store) -> None:
    bare = Experience(task_id="t", experience_id="e", group_id="g")
    store.append("experiences", [bare])
    [row] = store.scan("experiences").collect().to_dicts()
    given = {
        "task_id",
        "experience_id",
        "group_id",
        "source",
        "rollout_index",
        "purpose",
        "created_at",
        "digest",
    }
    assert {name for name, value in row.items() if value is not None} == given
    assert Experience.from_row(row) == bare


def test_empty_is_not_null(store: Store) -> None:
    empty = Experience(
        task_id="t", experience_id="e", group_id="g", token_ids=[], logprobs=[], response_text=""
    )
    store.append("experiences", [empty])
    [row] = store.scan("experiences").collect().to_dicts()
    assert (row["token_ids"], row["logprobs"], row["response_text"]) == ([], [], "")
    assert (row["loss_mask"], row["num_tokens"]) == (None, 0)


def test_a_task_comes_back_as_it_was_with_its_id(store: Store) -> None:
    tasks = [
        Task.ask("2+2=", "4"),
        Task(
            messages=[{"role": "system", "content": "é"}, {"role": "user", "content": "世界"}],
            taskset="s",
            split="eval",
            workflow="w",
            metadata={"a": {"b": [1, None]}},
        ),
        Task(messages=[{"role": "system", "content": "only"}]),
    ]
    store.append("tasks", tasks)
    stored = store.scan("tasks").collect().to_dicts()
    assert [Task.from_row(row) for row in stored] == tasks
    assert [Task.from_row(row).task_id for row in stored] == [t.task_id for t in tasks]
    assert [row["prompt_text"] for row in stored] == ["2+2=", "世界", None]


def test_a_task_is_its_content(store: Store) -> None:
    assert store.append("tasks", [Task.ask("1", "1"), Task.ask("1", "1")]).rows == 1
    assert store.append("tasks", [Task.ask("1", "2"), Task.ask("1", "1", split="eval")]).rows == 2


def test_a_reward_is_the_sum_of_its_parts_or_null() -> None:
    assert FULL.with_reward({"a": 1.0, "b": 0.5}).reward == 1.5
    unknown = FULL.with_reward({"a": 1.0, "b": None})
    assert (unknown.reward, unknown.rewards) == (None, {"a": 1.0, "b": None})


def test_an_experience_without_a_name_is_refused(store: Store) -> None:
    with pytest.raises(SchemaError, match="no `experience_id` or `group_id`, expected both"):
        store.append("experiences", [Experience(task_id="t")])


@pytest.mark.parametrize(
    "messages", [["hello"], "hello", [None], [{"content": "2+2="}], [{"role": 1, "content": "2"}]]
)
def test_messages_that_are_no_conversation_are_refused(store: Store, messages: Any) -> None:
    experience = Experience(task_id="t", experience_id="e", group_id="g", messages=messages)
    for table, record in (("tasks", Task(messages=messages)), ("experiences", experience)):
        with pytest.raises(SchemaError, match="`messages` must be a list of objects with a `role`"):
            store.append(table, [record])


def test_frames_of_records_are_typed_as_declared() -> None:
    assert rows([FULL]).to_arrow().schema.names == list(TABLES["experiences"].names)


def test_a_store_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    newer = {"rlake.schema_version": str(SCHEMA_VERSION + 1)}
    for name, table in TABLES.items():
        empty = table.schema.with_metadata(newer).empty_table()
        lance.write_dataset(empty, str(tmp_path / f"{name}.lance"))
    told = (
        rf"has schema {SCHEMA_VERSION + 1}, this rlake reads up to {SCHEMA_VERSION}; upgrade .*; "
        "what a build from before .* export with that build .* `rlake import`"
    )
    with pytest.raises(NotAStoreError, match=told):
        connect(tmp_path)
