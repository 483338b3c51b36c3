"""Trajectories of agents that call tools: imported, asked about, found, exported, trained on."""

import json
from pathlib import Path

import pytest
from support.chat_templates import QWEN25
from support.commands import Command
from support.files import lines
from support.tiny_models import tiny

from rlake.store import Store, connect
from rlake.store.raw_json import elements, members

FILE = Path(__file__).parents[1] / "files" / "trajectories.jsonl"
LINES = FILE.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def imported(rlake: Command) -> Store:
    """Return a store with the trajectories."""
    said = rlake("import", "experiences", FILE)
    assert "imported 6 experiences" in said.stdout, said.stderr
    assert "read as chat" in said.stdout
    told = "cannot be trained on: 1 row (it has no assistant turn)"
    assert told in said.stdout
    again = json.loads(rlake("import", "experiences", FILE, "--json").stdout)
    assert (again["rows"], again["already"]) == (0, 6)
    assert again["untrainable"] == {"it has no assistant turn": 1}
    return connect("lake")


def test_whole_trajectories_go_out_as_they_came_in(imported: Store, rlake: Command) -> None:
    said = rlake("export", "chat", "--out", "chat.jsonl")
    assert "left out: 1 row (it has no assistant turn)" in said.stdout
    for line, before in zip(Path("chat.jsonl").read_text().splitlines(), LINES, strict=False):
        for name in ("messages", "tools"):
            assert members(line)[name] == members(before)[name]
    assert len(lines("chat.jsonl")) == 5
    other = json.loads(
        rlake("import", "experiences", "chat.jsonl", "--format", "chat", "--store", "b").stdout
        and rlake("sql", "SELECT messages FROM experiences", "--store", "b", "--json").stdout
    )
    assert [row["messages"] for row in other] == [members(line)["messages"] for line in LINES[:5]]


def test_sft_has_a_line_for_each_turn_of_an_assistant(imported: Store, rlake: Command) -> None:
    assert rlake("export", "sft", "--out", "sft.jsonl").returncode == 0
    made = lines("sft.jsonl")
    turns = [
        len(json.loads(line)["messages"][:place])
        for line in LINES
        for place, message in enumerate(json.loads(line)["messages"])
        if message["role"] == "assistant"
    ]
    assert [len(line["prompt"]) for line in made] == turns
    assert {m["role"] for line in made for m in line["completion"]} == {"assistant"}
    first = members(Path("sft.jsonl").read_text().splitlines()[0])
    talk = elements(members(LINES[0])["messages"])
    assert elements(first["prompt"]) + elements(first["completion"]) == talk[:3]


def test_sharegpt_has_calls_results_and_where_it_ends(imported: Store, rlake: Command) -> None:
    assert rlake("export", "sharegpt", "--out", "s.jsonl").returncode == 0
    said = [[t["from"] for t in line["conversations"]] for line in lines("s.jsonl")]
    assert len(said) == 5
    assert said[0][-3:] == ["function_call", "observation", "observation"]
    assert said[1][-2:] == ["gpt", "human"]
    assert said[3] == ["human", "function_call", "observation"]
    assert said[4] == ["human", "gpt"]
    rlake("import", "experiences", "s.jsonl", "--store", "b")
    found = connect("b").sql("SELECT name, result, is_error FROM tool_calls WHERE turn = 5")
    assert ("order", "Error: order not found", True) in found.fetchall(), "in their order"


def test_a_trajectory_is_found_by_its_last_answer(imported: Store, rlake: Command) -> None:
    texts = imported.sql(
        "SELECT response_text, prompt_text FROM experiences ORDER BY created_at"
    ).fetchall()
    assert [text for text, _ in texts] == [
        "Let me look both up.",
        "W-1 is on its way. I cannot find W-2.",
        "I may not pay W-1 back.",
        None,
        "Yes, it is paid.",
        None,
    ]
    assert texts[4][1] == "Is order W-3 paid?"
    tasks = imported.sql("SELECT prompt_text FROM tasks").fetchall()
    assert ("Is order W-3 paid?",) in tasks
    found = json.loads(rlake("search", "on its way", "--json").stdout)
    assert "on its way" in json.dumps(found)
    assert rlake("embed").returncode == 0


def test_turns_and_calls_are_rows(imported: Store, rlake: Command) -> None:
    first = "SELECT experience_id FROM experiences ORDER BY created_at"
    ids = [name for (name,) in imported.sql(first).fetchall()]
    turns = imported.sql(
        "SELECT turn, role, content, num_tool_calls, tool_call_id FROM turns "
        f"WHERE experience_id = '{ids[0]}' ORDER BY turn"
    ).fetchall()
    talk = json.loads(LINES[0])["messages"]
    assert turns == [
        (i, m["role"], m["content"], len(m.get("tool_calls", ())), m.get("tool_call_id"))
        for i, m in enumerate(talk)
    ]
    calls = imported.sql(
        "SELECT index, turn, name, arguments, result, is_error FROM tool_calls "
        f"WHERE experience_id = '{ids[0]}' ORDER BY index"
    ).fetchall()
    assert calls == [
        (0, 2, "find_user", '{"name":  "Zo\\u00eb"}', talk[3]["content"], False),
        (1, 4, "order", '{"order_id": "W-1"}', '{"status": "sent", "error": null}', False),
        (2, 4, "order", '{"order_id": "W-2"}', "Error: order not found", True),
    ]
    refund = "SELECT arguments, result, is_error FROM tool_calls WHERE name = 'refund'"
    [(arguments, result, is_error)] = imported.sql(refund).fetchall()
    assert (result, is_error) == ('{"error": "not allowed"}', True)
    assert json.loads(arguments)["lines"][0] == {
        "sku": "é-½", "price": 1.5, "big": 12345678901234567890123,
    }  # fmt: skip
    older = f"SELECT name, arguments, result FROM tool_calls WHERE experience_id = '{ids[3]}'"
    assert imported.sql(older).fetchall() == [("find_user", '{"name": "Ann"}', "ann_7")]
    parts = f"SELECT content FROM turns WHERE experience_id = '{ids[4]}' ORDER BY turn"
    assert imported.sql(parts).fetchall() == [("Is order W-3 paid?",), ("Yes, it is paid.",)]
    listed = rlake("tables").stdout
    assert "a call of a tool, with its result" in listed
    assert "arguments" in rlake("tables", "tool_calls").stdout


def test_models_are_trained_on_what_the_assistants_did(imported: Store, rlake: Command) -> None:
    letters = "".join(sorted(set("".join(LINES)) | set("<|im_start|>assistant\n")))
    model, tokenizer = tiny(max_length=4096, alphabet=letters)
    tokenizer.chat_template = QWEN25.replace("tool'", "tool' or m.role == 'function'").replace(
        "<|im_end|>", "<eos>"
    )
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("sft.yaml").write_text(
        "name: sft\nthreads: 1\nmodel: {path: model}\nalgorithm: sft\n"
        "trainer: {batch_size: 6, max_uses: 1, learning_rate: 1e-3}\n"
    )
    done = rlake("train", "sft.yaml")
    assert done.returncode == 0, done.stderr
    drawn = imported.sql(
        "SELECT weight FROM draws JOIN experiences e USING (experience_id) ORDER BY e.created_at"
    ).fetchall()
    assert [weight for (weight,) in drawn] == [1.0] * 5 + [0.0], "the last one has no answer"
    why = imported.sql("SELECT error FROM operator_errors").fetchall()
    assert why == [("it has no tokens",)]
