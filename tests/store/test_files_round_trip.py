"""What comes in goes out: the bytes of conversations, and files of every kind and shape."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files import bring, write

from rlake.store import Store, connect
from rlake.store.errors import ConfigError, InputError
from rlake.store.files import export
from rlake.store.raw_json import elements, listed, members, objects

ODD = (
    '[{"role":"user" , "content":"caf\\u00e9 \\ud83d\\ude00 é"},'
    ' {"content":null,"role":"assistant","tool_calls":[{"type":"function","id":"c1",'
    '"function":{"name":"f","arguments":"{\\"x\\":  1.50}"}}],'
    '"n":1e5,"m":-0.0,"big":12345678901234567890123},'
    '\t{"role":"tool","tool_call_id":"c1","content":"1.0"},'
    '{"role":"assistant","content":"ok","extra":{"z":1,"a":{}, "e":[ ]}}]'
)
TOOLS = '[{"type":"function","function":{"name":"f","parameters":{"minimum":1.0,"b":1,"a":2}}}]'


def texts(store: Store) -> list[tuple[Any, ...]]:
    return store.sql("SELECT messages, tools FROM experiences").fetchall()


@pytest.mark.parametrize("format", ["chat", None], ids=["as chat", "by our columns"])
def test_conversations_with_tool_calls_survive_a_round_trip_byte_for_byte(
    store: Store, tmp_path: Path, format: str | None
) -> None:
    plain = '[{"role":"user","content":"hi"},{"role":"assistant","content":"yo"}]'
    lines = f'{{"messages": {ODD}, "tools": {TOOLS}}}\n{{"messages":{plain}}}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    bring(store, "experiences", tmp_path / "a.jsonl", format=format)
    assert texts(store) == [(ODD, TOOLS), (plain, None)]
    export(store, "chat", tmp_path / "b.jsonl")
    out = (tmp_path / "b.jsonl").read_text()
    assert out.splitlines() == [
        f'{{"messages": {ODD}, "tools": {TOOLS}}}',
        f'{{"messages": {plain}}}',
    ]
    other = connect(tmp_path / "other")
    bring(other, "experiences", tmp_path / "b.jsonl", format="chat")
    assert texts(other) == texts(store)
    export(store, "sft", tmp_path / "sft.jsonl")
    called, told = map(members, (tmp_path / "sft.jsonl").read_text().splitlines()[:2])
    assert elements(called["prompt"]) + elements(called["completion"]) == elements(ODD)[:2]
    assert elements(told["prompt"]) + elements(told["completion"]) == elements(ODD)
    assert called["tools"] == told["tools"] == TOOLS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ""])
def test_whole_rows_come_back_equal_from_each_kind_of_file(
    store: Store, tmp_path: Path, suffix: str
) -> None:
    row = {
        "token_ids": [1, 2, 3],
        "loss_mask": [False, False, True],
        "logprobs": [0.0, 0.0, -0.5],
        "prompt_length": 2,
        "num_tokens": 3,
        "reward": 0.5,
        "rewards": [{"name": "a", "value": 0.5}],
        "metadata": {"z": 1, "a": [1.50]},
    }
    line = json.dumps(row)[:-1] + f', "messages": {ODD}, "tools": {TOOLS}}}\n'
    (tmp_path / "a.jsonl").write_text(line)
    bring(store, "experiences", tmp_path / "a.jsonl")
    done = export(store, "experiences", tmp_path / f"out{suffix}")
    assert (done.rows, done.left_out) == (1, 0)
    other = connect(tmp_path / "other")
    bring(other, "experiences", tmp_path / f"out{suffix}")
    both = [
        s.scan("experiences").drop("lineage_id", "digest").collect().to_dicts()
        for s in (store, other)
    ]
    assert both[0] == both[1]


def test_messages_printed_over_many_lines_are_exported_on_one(store: Store, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]
    (tmp_path / "a.json").write_text(json.dumps([{"messages": talk}], indent=2))
    bring(store, "experiences", tmp_path / "a.json")
    export(store, "chat", tmp_path / "b.jsonl")
    (line,) = (tmp_path / "b.jsonl").read_text().splitlines()
    assert json.loads(line) == {"messages": talk}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SPACES = st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", "\t: ")])


@settings(max_examples=60)
@given(st.dictionaries(st.text(), VALUES, max_size=4), SPACES, st.sampled_from([False, True]))
def test_values_are_told_apart_as_they_are_spelled(
    value: dict[str, Any], spaces: tuple[str, str], escaped: Any
) -> None:
    def spell(part: Any) -> str:
        return json.dumps(part, separators=spaces, ensure_ascii=escaped)

    assert members(spell(value)) == {k: spell(v) for k, v in value.items()}
    assert elements(spell(list(value.values()))) == [spell(v) for v in value.values()]
    assert json.loads(listed(elements(spell([*value])))) == [*value]


@pytest.mark.parametrize("text", ['[{"a": 1}, {"b": [2]}]', '{"a": 1}\n\n{"b": [2]}', '{"a":1}'])
def test_objects_are_found_in_a_list_and_one_after_the_other(tmp_path: Path, text: str) -> None:
    padded = text.replace("1}", "1" + " " * (3 << 20) + "}")  # longer than what is read at once
    for spelled in (text, padded):
        (tmp_path / "a.json").write_text(spelled)
        found = [json.loads(t) for t in objects(tmp_path / "a.json")]
        assert found == ([{"a": 1}, {"b": [2]}] if "b" in text else [{"a": 1}])


@pytest.fixture
def rated(store: Store, tmp_path: Path) -> Store:
    """Return a store with two rated tries, with tools, and the pair of them."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    rows = [
        {
            "experience_id": name,
            "messages": [
                *asked,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
                {"role": "assistant", "content": name},
            ],
            "tools": json.loads(TOOLS),
            "reward": reward,
        }
        for name, reward in (("good", 1.0), ("bad", 0.0), ("unrated", None))
    ]
    path = tmp_path / "rows.jsonl"
    write(path, *rows)
    bring(store, "experiences", path)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"chosen_id": "good", "rejected_id": "bad"}\n')
    bring(store, "preferences", pairs)
    return store


def test_kto_labels_what_was_rated(rated: Store, tmp_path: Path) -> None:
    done = export(rated, "kto", tmp_path / "a.jsonl")
    lines = [json.loads(x) for x in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [(x["completion"][0]["content"], x["label"]) for x in lines] == [
        ("good", True),
        ("bad", False),
    ]
    assert [sorted(x) for x in lines] == [["completion", "label", "prompt", "tools"]] * 2
    assert (done.rows, done.left_out) == (2, 1)


def test_sharegpt_goes_out_in_its_own_roles_and_comes_back(rated: Store, tmp_path: Path) -> None:
    export(rated, "sharegpt", tmp_path / "a.jsonl", where="experience_id = 'good'")
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(line)["conversations"] == [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "good"},
    ]
    assert json.loads(line)["system"] == "be brief"
    other = connect(tmp_path / "other")
    bring(other, "experiences", tmp_path / "a.jsonl")
    ((messages, tools),) = texts(other)
    said = [(m["role"], m.get("content")) for m in json.loads(messages)]
    assert said == [
        ("system", "be brief"),
        ("user", "q"),
        ("assistant", None),
        ("tool", "r"),
        ("assistant", "good"),
    ]
    assert tools == TOOLS.replace(":", ": ").replace(",", ", ")


@pytest.mark.parametrize("what", ["sft", "dpo", "kto", "chat", "sharegpt"])
def test_tables_hold_what_the_lines_do(rated: Store, tmp_path: Path, what: str) -> None:
    for suffix in (".jsonl", ".parquet", ".arrow", ""):
        export(rated, what, tmp_path / f"{what}{suffix}")
    lines = [json.loads(x) for x in (tmp_path / f"{what}.jsonl").read_text().splitlines()]
    with pa.OSFile(str(tmp_path / what / "data-00000-of-00001.arrow")) as file:
        saved = pa.ipc.open_stream(file).read_all()
    with pa.OSFile(str(tmp_path / f"{what}.arrow")) as file:
        arrow = pa.ipc.open_file(file).read_all()
    for table in (pq.read_table(tmp_path / f"{what}.parquet"), arrow, saved):
        rows = [without_null(row) for row in table.to_pylist()]
        for row in rows:
            row["tools"] = json.loads(row["tools"])
        assert rows == [without_null(line) for line in lines]
    state = json.loads((tmp_path / what / "state.json").read_text())
    assert state["_data_files"] == [{"filename": "data-00000-of-00001.arrow"}]


def without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_null(v) for k, v in value.items() if v is not None}
    return [without_null(v) for v in value] if isinstance(value, list) else value


def test_rows_without_a_common_type_are_no_table(store: Store, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": c}]}
        for c in ("text", [{"type": "text", "text": "part"}])
    ]
    write(tmp_path / "a.jsonl", *rows)
    bring(store, "experiences", tmp_path / "a.jsonl")
    with pytest.raises(InputError, match=r"no types in common.*write to `b.jsonl`"):
        export(store, "sft", tmp_path / "b.parquet")
    assert export(store, "sft", tmp_path / "b.jsonl").rows == 2
    assert not list(tmp_path.glob("*part*"))


def test_an_export_does_not_replace_a_folder(rated: Store, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="it exists; name a new folder"):
        export(rated, "sft", tmp_path / "mine")
    with pytest.raises(InputError, match="no rows to export as sft"):
        export(rated, "sft", tmp_path / "new", where="false")
    assert sorted(p.name for p in tmp_path.iterdir() if "new" in p.name) == []
