"""JSON of a file through a SELECT: as it is spelled there, under any name, whole or in parts."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlake.store import Store
from rlake.store.errors import QueryError, SchemaError
from rlake.store.files import export, import_rows, open_input
from rlake.store.raw_json import elements

TALK = (
    '[{"role":"user","content":"h\\u00e9 \\n","n":9223372036854775809, "b":18446744073709551617,'
    '"f":1.0,"g":1,"z":null,"e":1e2,"p":0.12345678901234567890,"d":1,"d":2},'
    '  {"role": "assistant","content":"x"}]'
)
SHORT = '[{"content":"q","role":"user"},{"role":"assistant","content":"y","tool_calls":[{"id":1}]}]'
TOOLS = '[{"name":"f","x":1.0, "y" : null}]'
META = '{"b":1,"a":[1.50], "n": null, "t":"q\\u00e9"}'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file whose columns have names of their own, and rows that differ in their keys."""
    path = tmp_path / "talks.jsonl"
    path.write_text(
        f'{{"conversation": {TALK}, "functions": {TOOLS}, "about": {META}, "id": 2, "k": 1}}\n'
        f'{{"conversation": {SHORT}, "functions": null, "about": {{"zz":2}}, "id": 3, "k": 2}}\n'
    )
    return path


def bring(store: Store, path: Path, select: str, table: str = "experiences") -> None:
    with open_input(path) as file:
        import_rows(store, table, file, sql=select)


def kept(store: Store, *columns: str) -> list[tuple[Any, ...]]:
    return store.scan("experiences").select(*columns).collect().rows()


@pytest.mark.parametrize(
    "select",
    [
        "SELECT conversation AS messages, functions AS tools, about AS metadata FROM input",
        "WITH a AS (SELECT conversation AS c, * FROM input), b AS (SELECT functions, k FROM a) "
        "SELECT coalesce(a.c, a.c) AS messages, CASE WHEN a.k = 1 THEN b.functions END AS tools, "
        "about AS metadata FROM a JOIN b USING (k) ORDER BY k",
        "SELECT conversation->>'$' AS messages, functions->'$' AS tools, "
        "json_extract(about, '$') AS metadata FROM input",
    ],
)
def test_json_comes_as_it_is_spelled_under_any_name(store: Store, file: Path, select: str) -> None:
    bring(store, file, select)
    assert kept(store, "messages", "tools", "metadata") == [
        (TALK, TOOLS, META),
        (SHORT, None, '{"zz":2}'),
    ]


def test_parts_of_json_come_as_they_are_spelled(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "logs.jsonl"
    path.write_text(f'{{"body": {{"request": {{"messages": {TALK}}}, "tags": [{META}]}}}}\n')
    for i, select in enumerate(
        (
            "body->'request'->'messages' AS messages, body->'tags'->0 AS metadata",
            "body.request.messages AS messages, input.body->'$.tags[0]' AS metadata",
            "(body->'/request/messages')::JSON[] AS messages, (body->'tags')->>0 AS metadata",
        )
    ):
        row = f"'{i}' AS experience_id, 'e{i}' AS group_id"
        bring(store, path, f"SELECT {select}, {row} FROM input")
        found = kept(store, "messages", "metadata")[-1]
        assert elements(found[0]) == elements(TALK), select
        assert found[1] == META, select


def test_structs_and_lists_of_a_select_keep_the_json_in_them(store: Store, file: Path) -> None:
    bring(
        store,
        file,
        "SELECT [conversation->0, {'role': 'assistant', 'content': k::VARCHAR}] AS messages, "
        "{'about': about, 'id': id, 'none': NULL} AS metadata FROM input WHERE k = 1",
    )
    [(messages, metadata)] = kept(store, "messages", "metadata")
    assert elements(messages) == [elements(TALK)[0], '{"role":"assistant","content":"1"}']
    assert metadata == f'{{"about": {META}, "id": 2}}'


def test_a_part_is_text_or_a_number_where_the_column_is(store: Store, file: Path) -> None:
    bring(
        store,
        file,
        "SELECT conversation->0->'content' AS prompt_text, conversation->1->>'content' AS "
        "response_text, about->'a'->0 AS reward, about->>'t' AS answer FROM input WHERE k = 1",
    )
    assert kept(store, "prompt_text", "response_text", "reward") == [("hé \n", "x", 1.5)]
    [(answer,)] = store.scan("tasks").select("answer").collect().rows()
    assert answer == "qé"


def test_whole_numbers_that_a_float_would_round_are_kept(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"q": "x", "id": {2**64 + 1}}}\n{{"q": "y", "id": {2**63 + 1}}}\n')
    bring(store, path, "SELECT q AS prompt_text, {'id': id} AS metadata FROM input")
    assert kept(store, "metadata") == [(f'{{"id": {2**64 + 1}}}',), (f'{{"id": {2**63 + 1}}}',)]
    csv = tmp_path / "a.csv"
    csv.write_text(f"q,code,long\nx,007,{2**64 + 1}\n")
    bring(store, csv, "SELECT code AS prompt_text, long AS response_text FROM input")
    assert kept(store, "prompt_text", "response_text")[-1] == ("007", str(2**64 + 1))


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("SELECT conversation[1].content AS prompt_text", "`conversation` is JSON"),
        ("SELECT k::VARCHAR AS prompt_text, len(about) AS num_turns", "`about` is JSON"),
        ("SELECT json_object('a', about) AS metadata", "`json_object` writes JSON of the file"),
        ("SELECT to_json(conversation->0) AS metadata", "`to_json` writes JSON of the file"),
        ("SELECT conversation->'$[*]' AS messages", "chooses several values"),
        ("WITH a AS (SELECT about AS b FROM input) SELECT b[1:3] AS metadata", "`b` is JSON"),
    ],
)
def test_a_select_that_would_change_json_is_refused(
    store: Store, file: Path, select: str, words: str
) -> None:
    with pytest.raises(QueryError, match=words) as refused:
        bring(store, file, select if "FROM" in select else f"{select} FROM input")
    assert "`" in str(refused.value)
    assert store.count("experiences") == 0


def test_an_object_is_no_text(store: Store, file: Path) -> None:
    with pytest.raises(SchemaError, match=r"row 1 of .*`prompt_text` must be string.*`->>`"):
        bring(store, file, "SELECT about AS prompt_text FROM input")


def test_what_was_imported_is_exported_byte_for_byte(
    store: Store, file: Path, tmp_path: Path
) -> None:
    bring(store, file, "SELECT conversation AS messages, functions AS tools FROM input")
    export(store, "chat", tmp_path / "out.jsonl")
    first, second = (tmp_path / "out.jsonl").read_text().splitlines()
    assert first == f'{{"messages": {TALK}, "tools": {TOOLS}}}'
    assert second == f'{{"messages": {SHORT}}}'


def test_json_text_of_other_files_comes_as_it_is_spelled(store: Store, tmp_path: Path) -> None:
    rows = pa.table({"talk": [TALK], "about": [META]})
    pq.write_table(rows, tmp_path / "a.parquet")
    double = {name: text.replace('"', '""') for name, text in (("talk", TALK), ("about", META))}
    (tmp_path / "a.csv").write_text(f'talk,about\n"{double["talk"]}","{double["about"]}"\n')
    for name in ("a.parquet", "a.csv"):
        select = "SELECT talk AS messages, about AS metadata FROM input"
        bring(store, tmp_path / name, f"{select} WHERE about->>'b' = '1'")
        assert kept(store, "messages", "metadata")[-1] == (TALK, META), name
    assert json.loads(META)["b"] == 1
