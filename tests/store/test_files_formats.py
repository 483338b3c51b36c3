"""Named formats, from sample files that the real libraries wrote: see tests/files/make_*.py."""

import json
import os
import pickle
import random
import shutil
import sqlite3
import struct
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.files import answer, ask, bring, write

from rlake.loop.recipes import guru
from rlake.store import Store
from rlake.store.errors import ConfigError, InputError, SchemaError
from rlake.store.files import FORMATS
from rlake.store.files.formats import Row
from rlake.store.files.formats.safe_pickle import plain_values
from rlake.store.files.formats.trinity import experiences as trinity_rows
from rlake.store.files.select_columns import RowError

FILES = Path(__file__).parents[1] / "files"


def stored(store: Store, columns: str, table: str = "experiences") -> list[tuple[Any, ...]]:
    return store.sql(f"SELECT {columns} FROM {table}").fetchall()


def test_requests_and_responses_of_the_openai_client_become_tries(store: Store) -> None:
    done = bring(store, "experiences", FILES / "openai.jsonl")
    assert (done.format, done.rows, done.tasks) == ("chat", 3, 2)
    lines = (FILES / "openai.jsonl").read_text().splitlines()
    request = lines[1].split('"messages":[', 1)[1].split('],"n":2', 1)[0]
    call, four, five = stored(store, "messages, tools, finish_reason, num_turns, rollout_index")
    assert four[0] == f'[{", ".join(_apart(request))}, {{"content":"four ½","role":"assistant"}}]'
    assert '"arguments":"{\\"a\\": 2,  \\"b\\": 2.50}"' in call[0]
    tools = lines[1].split('"tools":', 1)[1].split('}, "response"', 1)[0]
    assert call[1] == four[1] == five[1] == tools
    assert [call[2:], four[2:], five[2:]] == [("tool_calls", 1, 0), ("stop", 2, 0), ("stop", 2, 1)]
    tokens = stored(store, "token_ids, loss_mask, logprobs, prompt_length, num_tokens, tokenizer")
    assert tokens == [
        (None, None, None, None, None, None),
        ([11, 12, 13, 21, 22], [False] * 3 + [True] * 2, [0.0, 0.0, 0.0, -0.25, -0.25], 3, 5, None),
        ([11, 12, 13, 23], [False] * 3 + [True], [0.0, 0.0, 0.0, -0.25], 3, 4, None),
    ]
    told = json.loads(stored(store, "metadata")[1][0])
    assert (told["model"], told["temperature"], told["id"]) == ("tiny", 0.7, "chatcmpl-2")
    assert told["usage"]["total_tokens"] == 5
    assert stored(store, "prompt_text", "tasks") == [("2+2.50=",), ("2+2.50=",)]


def _apart(messages: str) -> list[str]:
    decode, found, at = json.JSONDecoder().raw_decode, [], 0
    while at < len(messages):
        end = decode(messages, at)[1]
        found.append(messages[at:end])
        at = end + 1
    return found


def test_fine_tuning_lines_keep_their_tools_and_what_has_no_place_as_metadata(
    store: Store, tmp_path: Path
) -> None:
    row = {
        "messages": [ask("2+2="), answer("4")],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "parallel_tool_calls": False,
    }
    done = bring(store, "experiences", write(tmp_path / "a.jsonl", row))
    assert done.format == "chat"
    ((messages, tools, metadata),) = stored(store, "messages, tools, metadata")
    assert [json.loads(t) for t in (messages, tools)] == [row["messages"], row["tools"]]
    assert metadata == '{"parallel_tool_calls": false}'


@pytest.mark.parametrize("name", ["trl_text", "trl_chat"])
def test_completions_of_trl_keep_each_reward_and_a_missing_one_is_not_zero(
    store: Store, name: str
) -> None:
    done = bring(store, "experiences", FILES / f"{name}.parquet")
    rows = pq.read_table(FILES / f"{name}.parquet").to_pylist()
    assert (done.format, done.rows) == ("trl", len(rows))
    found = stored(store, "batch, prompt_text, response_text, rewards, reward, advantage")
    for row, (batch, prompt, response, rewards, reward, advantage) in zip(rows, found, strict=True):
        said = [row["prompt"], row["completion"]]
        talk = [s if isinstance(s, str) else s[0]["content"] for s in said]
        assert (batch, prompt, response, advantage) == (row["step"], *talk, row["advantage"])
        assert rewards == [{"name": n, "value": row[n]} for n in ("ones", "even")]
        both = None if row["even"] is None else row["ones"] + row["even"]
        assert reward == both
    assert {None} < {reward for *_, reward, _ in found}
    groups = stored(store, "group_id, rollout_index, token_ids")
    assert len({g for g, _, _ in groups}) == len({str(r["prompt"]) for r in rows})
    assert sorted(r for _, r, _ in groups) == [0, 0, 1, 1]
    assert {t for _, _, t in groups} == {None}


def test_rollout_dumps_of_verl_keep_their_extra_fields(store: Store) -> None:
    done = bring(store, "experiences", FILES / "verl.jsonl")
    assert (done.format, done.rows, done.tasks) == ("verl", 3, 2)
    found = stored(
        store, "prompt_text, response_text, reward, batch, rollout_index, metrics, metadata"
    )
    asked = "user\n2+2=\nassistant\n"

    def metrics(acc: float, format: float) -> list[dict[str, Any]]:
        return [{"name": "acc", "value": acc}, {"name": "format", "value": format}]

    assert found == [
        (asked, "4", 1.0, 7, 0, metrics(1, 1), '{"note": "right", "request_id": "a1"}'),
        (asked, "<think>hm</think>5", 0.0, 7, 1, metrics(0, 0.5),
         '{"note": "wrong", "request_id": "b2"}'),
        ("user\nCafé?\nassistant\n", "ünsure", 0.5, 7, 0, metrics(0, 0.25),
         '{"request_id": "c3"}'),
    ]  # fmt: skip
    assert stored(store, "answer", "tasks") == [("4",), ('{"any": ["yes", "no"]}',)]


def test_data_of_verls_trainers_are_tasks_from_lines_and_from_parquet(
    store: Store, tmp_path: Path
) -> None:
    folder = guru.write_stand_in(tmp_path / "guru", train=3, test=2)
    pl.read_ndjson(folder / "train.jsonl").write_parquet(tmp_path / "train.parquet")
    for path, rows in ((tmp_path / "train.parquet", 3), (folder / "test.jsonl", 2)):
        done = bring(store, "tasks", path)
        assert (done.format, done.rows) == ("verl_tasks", rows)
    found = stored(store, "prompt_text, answer, metadata", "tasks")
    assert len(found) == 5
    for prompt, result, metadata in found:
        assert prompt.endswith("Put the answer into \\boxed{}.")
        assert int(result) > 0
        assert metadata == '{"data_source": "math__stand_in"}'


def test_a_dataset_saved_by_hugging_face_is_read_shard_by_shard(store: Store) -> None:
    done = bring(store, "preferences", FILES / "saved")
    assert (done.format, done.rows, done.experiences, done.tasks) == ("preferences", 3, 6, 3)
    query = (
        "c.messages, r.messages, p.margin, c.reward, r.reward, c.task_id = r.task_id, t.taskset "
        "FROM preferences p JOIN experiences c ON c.experience_id = chosen_id "
        "JOIN experiences r ON r.experience_id = rejected_id "
        "JOIN tasks t ON t.task_id = p.task_id ORDER BY p.margin DESC"
    )
    for i, row in enumerate(store.sql(f"SELECT {query}").fetchall()):
        asked = [{"role": "system", "content": "Be brief."}, ask(f"{i}+{i}=")]
        talks = [*asked, answer(str(2 * i))], [*asked, answer("no idea, é")]
        assert (json.loads(row[0]), json.loads(row[1])) == talks
        assert row[2:] == (1 - 0.25 * i, 1.0, 0.25 * i, True, "saved")
    again = bring(store, "preferences", FILES / "saved")
    assert (again.rows, again.experiences, again.tasks, again.already) == (0, 0, 0, 3)


def test_of_a_folder_with_splits_one_is_chosen(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"splits `train`, `test`; choose one with `--split`"):
        bring(store, "preferences", FILES / "splits")
    with pytest.raises(ConfigError, match="did you mean `test`"):
        bring(store, "preferences", FILES / "splits", split="tset")
    assert bring(store, "preferences", FILES / "splits", split="test").rows == 1
    assert stored(store, "split, prompt_text", "tasks") == [("test", "2+2=")]


SHAPES: list[dict[str, Any]] = [
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    {"chosen": "2+2= 4", "rejected": "2+2= 5"},
    {"prompt": [ask("2+2=")], "chosen": [answer("4")], "rejected": [answer("5")]},
    {"chosen": [ask("2+2="), answer("4")], "rejected": [ask("2+2="), answer("5")]},
    {"prompt": "2+2=", "chosen": [ask("2+2="), answer("4")],
     "rejected": [ask("2+2="), answer("5")]},
    {"input": {"messages": [ask("2+2=")]}, "preferred_output": [answer("4")],
     "non_preferred_output": [answer("5")]},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_pairs_in_each_shape_are_two_tries_at_one_task(
    store: Store, tmp_path: Path, shape: dict[str, Any]
) -> None:
    done = bring(store, "preferences", write(tmp_path / "a.jsonl", shape))
    assert (done.rows, done.experiences, done.tasks) == (1, 2, 1)
    found = stored(store, "prompt_text, trim(response_text), reward")
    assert found == [("2+2=", "4", None), ("2+2=", "5", None)]
    ((chosen, rejected, margin),) = stored(store, "chosen_id, rejected_id, margin", "preferences")
    ids = [i for (i,) in stored(store, "experience_id")]
    assert ([chosen, rejected], margin) == (ids, None)


ODD_PAIRS = [
    ({"prompt": "q", "chosen": "", "rejected": "no"}, ("q", "", "no")),
    ({"prompt": "q", "chosen": "4", "rejected": "4 apples"}, ("q", "4", "4 apples")),
    ({"chosen": "Human: q Assistant:", "rejected": "Human: q Assistant: no"},
     ("Human: q Assistant:", "", " no")),
    ({"chosen": [ask("q"), answer("")], "rejected": [ask("q"), answer("no")]}, ("q", "", "no")),
    ({"prompt": "q", "chosen": "4", "rejected": "4"}, "its answers are equal"),
    ({"chosen": [ask("q")], "rejected": [ask("q"), answer("no")]},
     "one of its answers is the beginning of the other"),
    ({"chosen": [ask("q"), answer("a"), ask("r"), answer("b")],
      "rejected": [ask("q"), answer("a"), ask("s"), answer("c")]},
     "its conversations part at a question, not at an answer"),
]  # fmt: skip


@pytest.mark.parametrize(("odd", "expected"), ODD_PAIRS, ids=range(len(ODD_PAIRS)))
def test_an_odd_pair_is_one_or_is_left_out_with_its_reason_and_the_others_stay(
    store: Store, tmp_path: Path, odd: dict[str, Any], expected: str | tuple[str, ...]
) -> None:
    # a file has one shape
    good = {"prompt": "1", "chosen": "2", "rejected": "3"} if "prompt" in odd else {
        "chosen": "1 2", "rejected": "1 3"
    } if isinstance(odd["chosen"], str) else {
        "chosen": [ask("1"), answer("2")], "rejected": [ask("1"), answer("3")]
    }  # fmt: skip
    done = bring(store, "preferences", write(tmp_path / "a.jsonl", good, odd))
    if isinstance(expected, str):
        assert (done.rows, done.experiences, done.left_out) == (1, 2, {expected: 1})
        return
    assert (done.rows, done.left_out, done.untrainable) == (2, {}, {})
    better, worse = stored(store, "prompt_text, response_text")[2:]
    assert (*better, worse[1]) == expected


def test_answers_of_several_messages_share_the_task_of_the_prompt(
    store: Store, tmp_path: Path
) -> None:
    long = [answer("let me see"), ask("well?"), answer("4")]
    row = {"prompt": [ask("2+2=")], "chosen": long, "rejected": [answer("5")]}
    bring(store, "preferences", write(tmp_path / "a.jsonl", row))
    assert stored(store, "prompt_text", "tasks") == [("2+2=",)]
    assert stored(store, "num_turns, response_text") == [(2, "4"), (1, "5")]


def test_sharegpt_becomes_chat_with_calls_and_results(store: Store, tmp_path: Path) -> None:
    row = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "2+2="},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "four"},
        ],
        "tools": '[{"name": "add"}]',
        "id": "x1",
    }
    done = bring(store, "experiences", write(tmp_path / "a.jsonl", row))
    assert done.format == "sharegpt"
    ((messages, tools, metadata, turns),) = stored(store, "messages, tools, metadata, num_turns")
    assert json.loads(messages) == [
        {"role": "system", "content": "Be brief."},
        ask("2+2="),
        {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
        ]},
        {"role": "tool", "content": "4"},
        answer("four"),
    ]  # fmt: skip
    assert (tools, metadata, turns) == ('[{"name": "add"}]', '{"id": "x1"}', 2)


def test_token_ids_and_logprobs_of_a_file_are_kept_as_they_are(
    store: Store, tmp_path: Path
) -> None:
    rows = [
        {"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5], "reward": 1},
        {"prompt_ids": [1], "completion_ids": [3, 4], "prompt": "q", "completion": "a"},
    ]
    done = bring(store, "experiences", write(tmp_path / "a.jsonl", *rows))
    assert (done.format, done.rows) == ("tokens", 2)
    columns = "token_ids, loss_mask, logprobs, prompt_length, num_tokens, reward, response_text"
    assert stored(store, columns) == [
        ([1, 2, 3], [False, False, True], [0.0, 0.0, -0.5], 2, 3, 1.0, None),
        ([1, 3, 4], [False, True, True], None, 1, 3, None, "a"),
    ]
    wrong = rows[0] | {"logprobs": [-0.5, -0.5]}
    with pytest.raises(SchemaError, match=r"row 1 of `b.jsonl`: 2 logprobs for 1 tokens"):
        bring(store, "experiences", write(tmp_path / "b.jsonl", wrong))


def test_the_buffer_of_trinity_is_read_without_running_its_pickles(store: Store) -> None:
    done = bring(store, "experiences", FILES / "trinity.db")
    assert (done.format, done.rows, done.input_rows) == ("trinity", 3, 4)
    assert done.left_out == {"the blob is a pickle of Python objects, which can run any program": 1}
    assert done.not_read == {
        "texts and settings in the blob's pickle: `STACK_GLOBAL` is refused": 1
    }
    columns = "token_ids, loss_mask, logprobs, prompt_length, reward, policy_version, advantage"
    third = [-0.5, 0.0, -0.25, -1.0]
    assert stored(store, columns) == [
        ([5, 6, 7, 8, 9], [False] * 3 + [True] * 2, [0.0, 0, 0, -0.5, -0.25], 3, 1.0, 4, 0.75),
        ([5, 6, 7, 8, 9, 10], [False, False, True, False, True, True], [0.0, 0, *third], 2, 0.0,
         5, None),
        ([1, 2, 3], [False, True, True], [0.0, -0.5, -0.5], 1, None, 5, None),
    ]  # fmt: skip
    first, second, last = stored(
        store, "prompt_text, response_text, messages, tools, metrics, token_rewards"
    )
    assert first[:2] == ("2+2=", "4")
    assert first[4] == [{"name": "accuracy", "value": 1.0}]
    assert json.loads(second[2]) == [ask("2+2="), answer("4")]
    assert json.loads(second[3])[0]["function"]["name"] == "add"
    assert second[5] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert last[:2] == (None, None)
    teachers = stored(store, "teacher_logprobs")[1][0]
    assert teachers == pytest.approx([0, 0, -0.1, -0.2, -0.3, -0.4])
    assert stored(store, "batch") == [(3,), (3,), (None,)]
    kept = json.loads(stored(store, "metadata")[0][0])["trinity"]
    assert (kept["eid"]["batch"], kept["info"]["use_count"], kept["msg_id"]) == (3, 0, "aaaaaa")


def test_conversations_of_a_trinity_table_for_sft_are_read_from_their_column(
    store: Store, tmp_path: Path
) -> None:
    talk = json.dumps([ask("q"), answer("a")], separators=(",", ": "))
    con = sqlite3.connect(tmp_path / "a.db")
    con.execute("CREATE TABLE sft (id INTEGER PRIMARY KEY, message_list JSON)")
    con.execute("CREATE TABLE sft_blob (id INTEGER PRIMARY KEY, experience_bytes BLOB)")
    con.execute("INSERT INTO sft VALUES (1, ?)", [talk])
    con.commit()
    con.close()
    done = bring(store, "experiences", tmp_path / "a.db")
    assert (done.rows, done.not_read) == (1, {"no blob": 1})
    assert stored(store, "messages, token_ids") == [(talk, None)]


class Bomb:
    """What a hostile pickle holds: a call of the system's shell."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self._command,)


@pytest.mark.parametrize("where", ["alone", "among the texts"])
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_hostile_pickle_is_refused_and_does_nothing(
    store: Store, tmp_path: Path, where: str, protocol: int
) -> None:
    trap = tmp_path / "sprung"
    bomb = pickle.dumps({"items": [Bomb(f"touch {trap}")]}, protocol=protocol)
    shutil.copy(FILES / "trinity.db", tmp_path / "a.db")
    con = sqlite3.connect(tmp_path / "a.db")
    ((blob,),) = con.execute("SELECT experience_bytes FROM rollouts_blob WHERE id = 1").fetchall()
    start, pickled, tensors = struct.calcsize("<4sBQQ"), *struct.unpack_from("<QQ", blob, 5)
    header = struct.pack("<4sBQQ", b"TRXP", 1, len(bomb), tensors)
    hostile = bomb if where == "alone" else header + bomb + blob[start + pickled :]
    con.execute("UPDATE rollouts_blob SET experience_bytes = ?", [hostile])
    con.commit()
    con.close()
    if where == "alone":
        with pytest.raises(InputError, match="gave no rows, of 4 in the file; 4 rows: the blob is"):
            bring(store, "experiences", tmp_path / "a.db")
    else:
        done = bring(store, "experiences", tmp_path / "a.db")
        assert sum(done.not_read.values()) == done.rows == 4
    assert not trap.exists()
    pickle.loads(bomb)
    assert trap.exists(), "the trap works, so that not springing it means something"


def test_only_plain_values_of_a_pickle_are_read() -> None:
    value = {"a": [1, -5, 2**70, 1.5, None, True], "b": ("é", b"x", (), {}), "c": {"d": []}}
    shared = [1, 2]
    for protocol in (3, 4, 5):
        assert plain_values(pickle.dumps(value, protocol=protocol)) == value
        assert plain_values(pickle.dumps([shared, shared], protocol=protocol)) == [[1, 2]] * 2
    for odd in (pickle.dumps(Path()), pickle.dumps({1, 2}), b"", b"\x80\x04.", b"junk"):
        with pytest.raises(ValueError, match=r"refused|broken|no end|exhausted|opcode|not enough"):
            plain_values(odd)


def blob_of_trinity() -> bytes:
    con = sqlite3.connect(FILES / "trinity.db")
    ((blob,),) = con.execute("SELECT experience_bytes FROM rollouts_blob WHERE id = 1").fetchall()
    con.close()
    return blob


def test_a_broken_blob_of_trinity_is_told_of_whatever_is_broken() -> None:
    blob, chance = blob_of_trinity(), random.Random(0)
    outcomes = set()
    for _ in range(3000):
        broken = bytearray(blob)
        for _ in range(chance.randint(1, 4)):
            broken[chance.randrange(5, len(broken))] = chance.choice(
                [0, 255, chance.randrange(256)]
            )
        if chance.random() < 0.2:
            broken = broken[: chance.randrange(5, len(broken))]
        row = Row({"id": 1, "task_id": "t", "experience_bytes": bytes(broken)})
        try:
            outcomes |= {key for key in trinity_rows(row)[0] if key == "not_read"}
        except RowError as error:
            outcomes.add(str(error).partition(":")[0])
    assert outcomes == {"not_read", "the blob of `id` 1 is broken"}


def test_a_pickle_that_doubles_or_holds_itself_is_refused() -> None:
    doubled: Any = ["x"]
    for _ in range(60):
        doubled = [doubled, doubled]
    itself: list[Any] = []
    itself.append(itself)
    for bomb in (doubled, {"a": itself}, 1 << 100_000):
        data = pickle.dumps(bomb)
        assert len(data) < 20_000
        with pytest.raises(ValueError, match=r"too often|too many digits"):
            plain_values(data)


def test_arrow_files_and_streams_give_the_tasks_of_a_parquet_file(
    store: Store, tmp_path: Path
) -> None:
    rows = pa.table({"prompt_text": [f"{i}+{i}=" for i in range(3000)], "answer": ["x"] * 3000})
    pq.write_table(rows, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", rows.schema) as out:
        out.write_table(rows, max_chunksize=1700)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(tmp_path / "a.ipc", rows.schema, options=options) as out:
        out.write_table(rows)
    done = [bring(store, "tasks", tmp_path / f"a.{s}") for s in ("parquet", "arrow", "ipc")]
    assert [(d.rows, d.already) for d in done] == [(3000, 0), (0, 3000), (0, 3000)]
    sql = "SELECT b.prompt_text FROM input a JOIN input b USING (prompt_text) WHERE a.answer = 'x'"
    assert bring(store, "tasks", tmp_path / "a.ipc", sql=sql, taskset="b").rows == 3000


def test_each_format_has_a_line_of_help_and_no_two_are_known_by_the_same_columns() -> None:
    for name, format in FORMATS.items():
        assert format.about
        for needed in format.needs if format.known_by is None else format.known_by:
            sure = [f.name for f in FORMATS.values() if f.is_sure(needed)]
            assert sure == [name]
