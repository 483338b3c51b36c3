"""Import and export on the command line: what is counted and said, and what is refused."""

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import Command, refused
from support.files import write
from support.tiny_models import tiny
from transformers import PreTrainedTokenizerFast

from rlake.loop.models.chat_tokenizer import BROKEN_PREFIX, ConversationTokenizer
from rlake.loop.models.load import tokenizer_digest
from rlake.loop.trainer.row_tokens import tokenize
from rlake.store import Store, connect
from rlake.store.conversation import NO_ANSWER
from rlake.store.files import EXPORTS, FORMATS, KIND_NAMES, Tokens, import_rows, open_input
from rlake.store.files.duckdb_input import BATCH_BYTES, BATCH_ROWS

FILES = Path(__file__).parents[1] / "files"
TURNS = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
FORGETFUL = (  # it leaves out earlier answers, as templates do that hide earlier thoughts
    "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}"
    "{% endif %}{% endfor %}"
)


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_help_lists_every_format_with_half_a_line(rlake: Command) -> None:
    shown = rlake("import", "--help").stdout
    for name, about in KIND_NAMES.items() | {(f.name, f.about) for f in FORMATS.values()}:
        assert re.search(rf"^ *{name} +{re.escape(about)} *$", shown, re.MULTILINE), name
    shown = rlake("export", "--help").stdout
    for name, shape in EXPORTS.items():
        assert re.search(rf"^ *{name} +{re.escape(shape.about)} *$", shown, re.MULTILINE), name


def test_an_import_says_what_it_did(rlake: Command) -> None:
    said = rlake("import", "experiences", FILES / "trinity.db")
    assert "imported 3 experiences and 2 tasks" in said.stdout
    assert "read as trinity" in said.stdout
    assert "left out: 1 row (the blob is a pickle of Python objects" in said.stdout
    assert "not read: 1 row (texts and settings" in said.stdout
    again = rlake("import", "experiences", FILES / "trinity.db", "--json")
    done = json.loads(again.stdout)
    assert (done["rows"], done["already"], done["tasks"]) == (0, 3, 0)
    said = rlake("import", "preferences", FILES / "saved")
    assert said.stdout.startswith("imported 3 preferences and 6 experiences and 3 tasks")


def test_several_files_are_one_import_or_one_each(rlake: Command) -> None:
    files = [FILES / "trl_text.parquet", FILES / "trl_chat.parquet"]
    said = rlake("import", "experiences", *files, "--each")
    assert [line.split(", read as")[0][-16:] for line in said.stdout.splitlines()] == [
        "trl_text.parquet",
        "trl_chat.parquet",
    ]
    again = json.loads(rlake("import", "experiences", *files, "--each", "--json").stdout)
    assert [(done["rows"], done["already"]) for done in again["files"]] == [(0, 4), (0, 4)]


def test_files_by_pattern_are_one_import_and_wrong_rows_are_written_down(rlake: Command) -> None:
    write("a.jsonl", {"prompt_text": "1", "response_text": "x"})
    write("b.jsonl", {"prompt_text": "2", "response_text": "x"}, {"response_text": "x"})
    refused(rlake("import", "experiences", "*.jsonl"), "`*.jsonl` does not exist")
    refused(rlake("import", "experiences", "*.csv", "--glob"), "no file matches `*.csv`")
    refused(rlake("import", "experiences", "*.jsonl"), "does not exist; `--glob` reads the files")
    refused(rlake("import", "experiences", "*.jsonl", "--glob"), "row 2 of `b.jsonl`")
    said = rlake("import", "experiences", "*.jsonl", "--glob", "--skip-invalid", "--taskset", "t")
    assert said.stdout.startswith("imported 2 experiences and 2 tasks from a.jsonl")
    assert "and 1 more file" in said.stdout
    assert "skipped as invalid: 1 row (an experience needs `task_id`" in said.stdout
    assert "are in a.jsonl.rejected.jsonl" in said.stdout
    [told] = map(json.loads, Path("a.jsonl.rejected.jsonl").read_text().splitlines())
    assert (told["file"], told["row"], told["content"]) == ("b.jsonl", 2, {"response_text": "x"})


def test_an_export_of_a_snapshot_shows_the_store_as_it_was(rlake: Command) -> None:
    write("a.jsonl", {"messages": [say("user", "q"), say("assistant", "a")]})
    rlake("import", "experiences", "a.jsonl")
    connect("lake").snapshot("before")
    write("b.jsonl", {"messages": [say("user", "q"), say("assistant", "b")]})
    rlake("import", "experiences", "b.jsonl")
    assert "wrote 2 rows" in rlake("export", "chat", "--out", "now.jsonl").stdout
    said = rlake("export", "chat", "--out", "then.parquet", "--at", "before")
    assert "wrote 1 row" in said.stdout
    assert pq.read_table("then.parquet").num_rows == 1


# what does not fit


def saved_tokenizer(folder: str, template: str | None = TURNS) -> PreTrainedTokenizerFast:
    tokenizer = tiny(alphabet="0123456789+=?usaq ")[1]
    tokenizer.chat_template = template  # type: ignore[assignment]
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize(
    ("name", "content", "more", "words"),
    [
        ("a.jsonl", b'{"x": 1}', ["--format", "sharegpt"], ["needs the columns `conversations`"]),
        ("a.jsonl", b'{"x": 1}', ["--format", "trinity"], ["jsonl file", "SQLite"]),
        ("a.jsonl", b'{"x": 1}', ["--format", "hf"], ["is a file, expected a folder"]),
        ("a.db", b"SQLite format 3\x00junk", [], ["cannot read `a.db` as sqlite"]),
        ("a.db", b"junk and nothing else", [], ["`a.db`", "sqlite: file is not a database"]),
        ("a.arrow", b"ARROW1\x00\x00 junk", [], ["cannot read `a.arrow` as arrow"]),
        ("a.arrow", b"junk", [], ["cannot read `a.arrow` as arrow"]),
        ("a.jsonl", '{"prompt_text": "é"}'.encode("latin-1"), [], ["line 1", "not UTF-8"]),
        ("a.json", '{"prompt_text": "é"}'.encode("latin-1"), [], ["cannot read `a.json` as json"]),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    rlake: Command, name: str, content: bytes, more: list[str], words: list[str]
) -> None:
    Path(name).write_bytes(content)
    refused(rlake("import", "experiences", name, *more), *words)
    assert not Path("lake").exists()


@pytest.mark.parametrize("suffix", ["arrow", "ipc", "parquet", "db"])
def test_a_file_that_was_cut_off_is_refused_and_nothing_is_stored(
    rlake: Command, lake: Store, suffix: str
) -> None:
    rows = pa.table({"prompt_text": [f"{i * i * i:040}" for i in range(20_000)]})
    if suffix == "parquet":
        pq.write_table(rows, "a.parquet")
    elif suffix == "db":
        Path("a.db").write_bytes((FILES / "trinity.db").read_bytes())
    else:
        with (pa.ipc.new_file if suffix == "arrow" else pa.ipc.new_stream)(
            f"a.{suffix}", rows.schema
        ) as out:
            out.write_table(rows, max_chunksize=1000)
    whole = Path(f"a.{suffix}").read_bytes()
    Path(f"a.{suffix}").write_bytes(whole[: len(whole) * 6 // 10])
    table = "experiences" if suffix == "db" else "tasks"
    refused(rlake("import", table, f"a.{suffix}"), f"cannot read `a.{suffix}`", "nothing was")
    assert lake.count(table) == (0 if suffix == "db" else 1)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": [{"from": "alien", "value": "x"}]}, "a turn is from 'alien', expected"),
        ({"conversations": "none"}, "must be a list of turns"),
        ({"chosen": "a", "rejected": [say("assistant", "b")]}, "differ in shape"),
        ({"chosen": "same", "rejected": "other"}, "two answers to one prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "needs `chosen` and `rejected`"),
        ({"request": {"messages": [say("user", "q")]}, "response": {}}, "has no `choices`"),
        ({"request": {"x": 1}, "response": {}}, "`request.messages` must be a list"),
        ({"input": 1, "output": "x", "score": 1, "step": 1}, "`input` must be text, got 1"),
        ({"prompt_ids": "x", "response_ids": [1]}, "must be a list of token ids"),
    ],
)
def test_a_row_that_does_not_fit_its_format_is_named(
    rlake: Command, row: dict[str, Any], words: str
) -> None:
    good: dict[str, Any] = {
        "conversations": {"conversations": [{"from": "human", "value": "q"}]},
        "chosen": {"prompt": "q", "chosen": "a", "rejected": "b"},
    }.get(next(iter(row)), {})
    write("a.jsonl", *([good] if good else []), row)
    said = rlake("import", "experiences", "a.jsonl")
    refused(said, f"row {2 if good else 1} of `a.jsonl`: ", words)


def test_a_typing_error_in_a_column_is_not_taken_for_a_format(rlake: Command) -> None:
    write("a.jsonl", {"messages": [say("user", "q"), say("assistant", "a")], "rewrad": 1})
    refused(rlake("import", "experiences", "a.jsonl"), "did you mean `reward`?")


def test_a_database_that_is_no_buffer_is_refused(rlake: Command) -> None:
    con = sqlite3.connect("a.db")
    con.execute("CREATE TABLE people (name TEXT)")
    con.commit()
    con.close()
    refused(rlake("import", "experiences", "a.db"), "not a buffer of Trinity-RFT", "`people`")


def test_a_folder_without_a_dataset_is_refused(rlake: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(rlake("import", "tasks", "empty"), "it has no `state.json`")
    (tmp_path / "empty" / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
    refused(rlake("import", "tasks", "empty"), "its file `x.arrow` is missing")


# tokens


def test_a_tokenizer_makes_the_tokens_that_the_trainer_would(rlake: Command) -> None:
    tokenizer = saved_tokenizer("model")
    write(
        "a.jsonl",
        {"messages": [say("user", "2+2="), say("assistant", "4")]},
        {"messages": [say("user", "1"), say("assistant", "22"), say("user", "3"),
                      say("assistant", "4")]},
        {"messages": [say("user", "no answer")]},
    )  # fmt: skip
    rlake("import", "experiences", "a.jsonl", "--store", "text")
    said = rlake("import", "experiences", "a.jsonl", "--tokenizer", "model")
    assert said.stdout.endswith(
        f"tokenized: 2 rows\nleft as text: 1 row ({NO_ANSWER})\n"
        f"cannot be trained on: 1 row ({NO_ANSWER})\n"
    )
    rows = connect("lake").scan("experiences").collect()
    later = tokenize(connect("text").scan("experiences").collect(), tokenizer)
    assert rows["token_ids"].to_list() == later["token_ids"].to_list()
    assert rows["tokenizer"].to_list() == [tokenizer_digest(tokenizer)] * 2 + [None]
    assert rows["logprobs"].to_list() == [None] * 3
    assert rows["num_tokens"].to_list() == [9, 13, None]
    masks = ["".join(map(str, map(int, m))) for m in rows["loss_mask"].drop_nulls()]
    assert masks == ["0000000" + "11", "0000" + "111" + "0000" + "11"]
    assert rows["prompt_length"].to_list() == [7, 4, None]


def test_a_template_that_writes_earlier_turns_anew_leaves_text(rlake: Command) -> None:
    saved_tokenizer("model", FORGETFUL)
    talk = [say("user", "1"), say("assistant", "22"), say("user", "3"), say("assistant", "4")]
    write("a.jsonl", {"messages": talk}, {"messages": talk[:2]})
    said = rlake("import", "experiences", "a.jsonl", "--tokenizer", "model", "--json")
    done = json.loads(said.stdout)
    assert (done["tokenized"], done["untokenized"]) == (1, {BROKEN_PREFIX: 1})
    kept = connect("lake").sql("SELECT messages, token_ids, loss_mask, tokenizer FROM experiences")
    assert kept.fetchall()[0] == (json.dumps(talk), None, None, None)


def test_tokens_of_the_file_are_not_made_anew(rlake: Command) -> None:
    saved_tokenizer("model")
    write("a.jsonl", {"prompt_ids": [1], "response_ids": [2], "prompt": "1", "response": "2"})
    done = json.loads(
        rlake("import", "experiences", "a.jsonl", "--tokenizer", "model", "--json").stdout
    )
    assert (done["tokenized"], done["untokenized"]) == (0, {})
    kept = connect("lake").sql("SELECT token_ids, tokenizer FROM experiences").fetchall()
    assert kept == [([1, 2], None)]


def test_pairs_are_tokenized_too(rlake: Command) -> None:
    saved_tokenizer("model")
    write("a.jsonl", {"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    rlake("import", "preferences", "a.jsonl", "--tokenizer", "model")
    lengths = connect("lake").sql("SELECT num_tokens FROM experiences").fetchall()
    assert lengths == [(9,), (9,)]


def test_an_answer_that_calls_a_tool_is_tokenized_by_the_template() -> None:
    tokenizer = tiny(alphabet="uaq0123456789f")[1]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] or '' }}"
        "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}<eos>"
        "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f1"}}]}
    made = ConversationTokenizer(tokenizer)([say("user", "q"), call], None)
    assert isinstance(made, Tokens)
    words = [str(tokenizer.convert_ids_to_tokens(i)) for i in made.token_ids]
    assert words == ["u", "q", "<eos>", "a", "f", "1", "<eos>"]
    assert list(made.loss_mask) == [False] * 4 + [True] * 3


@pytest.mark.parametrize(
    ("folder", "words"), [("nowhere", "is not a folder"), ("bare", "holds no tokenizer")]
)
def test_a_folder_without_a_tokenizer_is_refused(rlake: Command, folder: str, words: str) -> None:
    Path("bare").mkdir()
    write("a.jsonl", {"prompt_text": "1", "response_text": "2"})
    refused(rlake("import", "experiences", "a.jsonl", "--tokenizer", folder), words)
    assert not Path("lake").exists()


def test_tasks_are_not_tokenized(rlake: Command) -> None:
    saved_tokenizer("model")
    write("a.jsonl", {"prompt_text": "1"})
    said = rlake("import", "tasks", "a.jsonl", "--tokenizer", "model")
    refused(said, "`--tokenizer` is for experiences")


# large files


def test_others_append_while_a_file_is_read(lake: Store, tmp_path: Path) -> None:
    num_rows = 3 * BATCH_ROWS
    write(
        str(tmp_path / "a.jsonl"),
        *({"prompt_text": f"{i}", "response_text": "x"} for i in range(num_rows)),
    )
    seen: list[str] = []

    def append(what: str, rows: int, nbytes: int) -> None:
        if what == "reading":
            other = {"experience_id": f"other/{rows}", "task_id": "t", "group_id": "g"}
            lake.append("experiences", [other | {"rollout_index": 0, "source": "explorer"}])
            seen.append(what)

    with open_input(tmp_path / "a.jsonl") as file:
        done = import_rows(lake, "experiences", file, progress=append)
    assert (done.rows, lake.count("experiences")) == (num_rows, num_rows + len(seen))
    assert len(seen) > 2


def test_batches_are_bounded_in_bytes_not_in_rows(lake: Store, tmp_path: Path) -> None:
    long = "x" * 200_000
    write(
        str(tmp_path / "a.jsonl"),
        *({"prompt_text": f"{i}", "response_text": long} for i in range(300)),
    )
    sizes: dict[str, list[int]] = {}
    with open_input(tmp_path / "a.jsonl") as file:
        import_rows(
            lake,
            "experiences",
            file,
            progress=lambda what, _, nbytes: sizes.setdefault(what, [0]).append(nbytes),
        )
    for what in ("reading", "storing experiences"):
        largest = max(b - a for a, b in zip(sizes[what], sizes[what][1:], strict=False))
        assert largest < 4 * BATCH_BYTES, what
        assert sizes[what][-1] > 300 * len(long)


def test_a_file_of_a_known_format_that_must_be_named_says_its_name(
    rlake: Command, tmp_path: Path
) -> None:
    (tmp_path / "gsm.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    refused(rlake("import", "tasks", "gsm.jsonl"), "say so with `--format gsm8k`")


@pytest.mark.parametrize("question", ["problem", "prompt", "question"])
def test_columns_with_other_names_are_mapped_by_the_command_that_the_error_gives(
    rlake: Command, question: str
) -> None:
    write("own.jsonl", {question: "2+2=", "solution": "4"})
    said = rlake("import", "tasks", "own.jsonl")
    select = f"SELECT {question} AS prompt_text, solution AS answer FROM input"
    refused(said, f'the file with `--sql "{select}"`')
    done = rlake("import", "tasks", "own.jsonl", "--sql", select)
    assert "imported 1 task from own.jsonl" in done.stdout
