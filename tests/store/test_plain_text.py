"""Questions and answers in plain text are filled in as one by one, by `Task` and `json.dumps`."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlake.store import Store, Task
from rlake.store.files import import_file
from rlake.store.files.defaults import Defaults, fill_tasks
from rlake.store.files.plain_text import as_messages, is_plain, task_columns
from rlake.store.ids import row_digests
from rlake.store.key_index import content
from rlake.store.schema import TABLES

_GIVEN = ("prompt_text", "answer", "taskset", "split", "workflow")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ROW = st.fixed_dictionaries(
    {"prompt_text": TEXT},
    optional={name: st.none() | TEXT for name in ("answer", "taskset", "split", "workflow")},
)


@given(st.lists(ROW, min_size=1, max_size=4))
def test_each_task_is_what_task_makes_of_it(rows: list[dict[str, str | None]]) -> None:
    kinds = [(c.name, c.type) for c in TABLES["tasks"].columns if c.name in _GIVEN]
    table = pa.Table.from_pylist(rows, pa.schema(kinds))
    made = task_columns(table, taskset="sums", split="eval")
    for i, row in enumerate(rows):
        task = Task.ask(
            row["prompt_text"] or "",
            row.get("answer"),
            taskset=row.get("taskset") or "sums",
            split=row.get("split") or "eval",
            workflow=row.get("workflow"),
        )
        assert {name: values[i].as_py() for name, values in made.items()} | {
            "metadata": None
        } == task.row()


@given(TEXT, st.none() | TEXT)
def test_messages_are_spelled_as_json_dumps_does(prompt: str, response: str | None) -> None:
    messages = [{"role": "user", "content": prompt}]
    if response is not None:
        messages.append({"role": "assistant", "content": response})
    made = as_messages(pa.array([prompt]), pa.array([response], pa.string()))
    assert made.to_pylist() == [json.dumps(messages, ensure_ascii=False)]


@pytest.mark.parametrize(
    "extra", [{"messages": '[{"role": "user", "content": "a"}]'}, {"metadata": "{}"}]
)
def test_messages_and_metadata_of_tasks_are_not_plain(extra: dict[str, str]) -> None:
    rows = pa.table({"prompt_text": ["a", "b"]})
    assert is_plain(rows, metadata="metadata")
    [(name, value)] = extra.items()
    assert not is_plain(rows.append_column(name, pa.array([None, value])), metadata="metadata")


def test_one_task_with_metadata_changes_no_other_task_of_its_batch() -> None:
    plain = pa.table({"prompt_text": ["1+1=", "2+2="], "answer": ["2", "4"]})
    mixed = plain.append_column("metadata", pa.array([None, '{"level": 1}']))
    first, second = (fill_tasks(rows, Defaults("sums")) for rows in (plain, mixed))
    names = second.column_names
    assert first.select(names).slice(0, 1).to_pylist() == second.slice(0, 1).to_pylist()
    assert first["task_id"][1] != second["task_id"][1]


def test_experiences_are_the_same_as_those_given_with_their_messages(
    store: Store, tmp_path: Path
) -> None:
    rows = [
        {"prompt_text": 'say "é\n"', "response_text": "\\ \x7f\x01", "reward": 0.1},
        {"prompt_text": "1+1=", "response_text": None, "reward": None},
    ]
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = import_file(store, tmp_path / "plain.jsonl", "experiences", taskset="sums")
    assert (done.rows, done.tasks, done.untrainable) == (2, 2, {"it has no assistant turn": 1})
    stored = store.scan("experiences").sort("created_at").collect().to_dicts()
    tasks = {t["task_id"]: t for t in store.scan("tasks").collect().to_dicts()}
    for one, row in zip(rows, stored, strict=True):
        task = Task.ask(str(one["prompt_text"]), taskset="sums")
        assert row["task_id"] == row["group_id"] == task.task_id
        assert task.row().items() <= tasks[task.task_id].items()
        said = one["response_text"]
        answer = [] if said is None else [{"role": "assistant", "content": said}]
        assert json.loads(row["messages"]) == [*task.messages, *answer]
        assert (row["prompt_text"], row["response_text"]) == (one["prompt_text"], said)
        assert (row["num_turns"], row["source"]) == (len(answer), "imported")
    again = import_file(store, tmp_path / "plain.jsonl", "experiences", taskset="sums")
    assert (again.rows, again.already) == (0, 2)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_digests_of_floats_are_those_of_their_json(kind: pa.DataType) -> None:
    values = pa.array([0.1, -0.0, 1e300 if kind == pa.float64() else 1e30, 5e-324, None, 3.0], kind)
    texts = [None if v is None else json.dumps(v) for v in values.to_pylist()]
    assert row_digests(pa.table({"a": values})) == row_digests(pa.table({"a": texts}))


def test_the_content_of_a_row_leaves_out_when_it_was_stored(store: Store) -> None:
    task = Task.ask("1+1=", "2").row()
    assert store.append("tasks", [task]).rows == 1
    rows = store.dataset("tasks").to_table()
    assert "created_at" not in content(rows, TABLES["tasks"]).column_names
    assert store.append("tasks", [task | {"lineage_id": "later"}]).duplicates == 1
