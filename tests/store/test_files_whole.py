"""Imports are whole: several files, compressed ones, wrong rows, groups in two files, leftovers."""

import bz2
import gzip
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rlake.store import Store
from rlake.store.errors import ConflictError, InputError, SchemaError
from rlake.store.files import Imported, Rejected, export, import_rows, open_input
from rlake.store.files.compression import decompressed

ROWS = [{"prompt_text": f"{i}+{i}=", "response_text": str(2 * i)} for i in range(3)]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def bring(store: Store, *paths: Path, table: str = "experiences", **options: Any) -> Imported:
    rejected = options.pop("rejected", None)
    with ExitStack() as opened:
        files = [opened.enter_context(open_input(p, rejected=rejected)) for p in paths]
        return import_rows(store, table, files, **options)


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def test_compressed_files_give_what_they_hold(store: Store, tmp_path: Path) -> None:
    text = lines(*ROWS)
    table = "prompt_text,response_text\n" + "".join(f"{i}+{i}=,{2 * i}\n" for i in range(3))
    forms = {
        "a.jsonl.gz": gzip.compress(text.encode()),
        "a.json.zst": zstd(json.dumps(ROWS).encode()),
        "a.csv.bz2": bz2.compress(table.encode()),
    }
    done = []
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        done.append(bring(store, tmp_path / name))
    assert [(d.rows, d.already) for d in done] == [(3, 0), (0, 3), (0, 3)]
    assert store.scan("tasks").collect()["taskset"].to_list() == ["a"] * 3


def test_a_compressed_file_that_was_cut_off_is_refused(store: Store, tmp_path: Path) -> None:
    for suffix, pack in ((".gz", gzip.compress), (".zst", zstd), (".bz2", bz2.compress)):
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(pack(lines(*ROWS).encode())[:-9])
        with pytest.raises(InputError, match=r"cannot read .* as .*; nothing was imported"):
            bring(store, path)
    assert store.count("experiences") == 0


def test_what_a_file_holds_is_bounded_by_the_room_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * (64 << 20)))
    monkeypatch.setattr("rlake.store.files.compression._ROOM", 1 << 62)
    with pytest.raises(InputError, match="holds more than there is room for"):
        decompressed(path, tmp_path / "..")


def test_experiences_that_are_refused_leave_no_tasks_behind(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(ROWS[0] | {"experience_id": "e"}))
    bring(store, path)
    before = store.versions()
    path.write_text(lines(ROWS[1], ROWS[2] | {"experience_id": "e"}))
    with pytest.raises(ConflictError, match="'e' is in `experiences` already"):
        bring(store, path)
    assert store.versions() == before


def test_several_files_are_one_import(store: Store, tmp_path: Path) -> None:
    names = [tmp_path / f"{n}.jsonl" for n in "ab"]
    names[0].write_text(lines(ROWS[0] | {"reward": 1}))
    names[1].write_text(lines({"prompt_text": ["wrong"]}))
    before = store.versions()
    with pytest.raises(SchemaError):
        bring(store, *names, taskset="t")
    assert store.versions() == before
    names[1].write_text(lines(ROWS[0] | {"reward": 1}, ROWS[1]))
    done = bring(store, *names, taskset="t")
    assert (done.rows, done.already, done.tasks, done.input_rows) == (2, 1, 2, 3)
    after = store.versions()
    assert [after[t] - before[t] for t in ("tasks", "experiences", "lineage")] == [1, 1, 1]
    [(source,)] = store.sql("SELECT source FROM lineage").fetchall()
    assert source == "file a.jsonl, b.jsonl"
    assert [bring(store, n, taskset="t").rows for n in names] == [0, 0]


def test_tries_of_a_group_in_two_files_have_numbers_of_their_own(
    store: Store, tmp_path: Path
) -> None:
    def tries(*said: str) -> str:
        row = {"prompt_text": "2+2=", "group_id": "g"}
        return lines(*(row | {"response_text": s} for s in said))

    def numbers() -> list[tuple[str, int]]:
        return store.sql(
            "SELECT response_text, rollout_index FROM experiences ORDER BY 2, 1"
        ).fetchall()

    paths = [tmp_path / f"{n}.jsonl" for n in "abc"]
    for path, said in zip(paths, (("a", "b"), ("c", "d"), ("b", "e")), strict=True):
        path.write_text(tries(*said))
    assert bring(store, paths[0], taskset="t").rows == 2
    assert bring(store, paths[1], taskset="t").rows == 2
    assert numbers() == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    again = [bring(store, path, taskset="t") for path in paths]
    assert [(d.rows, d.already) for d in again] == [(0, 2), (0, 2), (1, 1)]
    assert numbers()[-1] == ("e", 4)


def test_rows_that_are_wrong_are_left_out_and_written_down(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good, tokens = ROWS[0], {"token_ids": [1, 2], "loss_mask": [True]}
    path.write_text(
        lines(good)
        + "{broken\n"
        + lines({"response_text": "no question"}, ROWS[1] | tokens, {"messages": [{"a": 1}]})
        + lines({"messages": json.dumps({"role": "user"})}, ROWS[2])
    )
    with pytest.raises(InputError, match="line 2"):
        bring(store, path)
    rejected = Rejected(tmp_path / "wrong.jsonl")
    done = bring(store, path, rejected=rejected)
    assert (done.rows, done.skipped) == (2, 5)
    assert sum(done.rejected.values()) == 5
    told = [json.loads(line) for line in (tmp_path / "wrong.jsonl").read_text().splitlines()]
    assert [t.get("line", t.get("row")) for t in told] == [2, 4, 5, 2, 3]
    assert told[0]["content"] == "{broken"
    assert all(t["file"] == "a.jsonl" and t["reason"] for t in told)


def test_rows_of_a_named_format_and_of_a_table_are_left_out_too(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    turn = {"from": "human", "value": "q"}
    path.write_text(lines({"conversations": [turn]}, {"conversations": "none"}))
    done = bring(store, path, rejected=Rejected())
    assert (done.rows, done.skipped, done.format) == (1, 1, "sharegpt")
    csv = tmp_path / "a.csv"
    csv.write_text("prompt_text,metadata\na,{}\nb,{broken\n")
    done = bring(store, csv, table="tasks", rejected=Rejected())
    assert (done.rows, done.skipped) == (1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"prompt_text": "a"}, {"prompt_text": "b"}', "cannot read `a.json`"),
        ('[{"prompt_text": "a"}', "cannot read `a.json`"),
        ('[{"prompt_text": "a"} {"prompt_text": "b"}]', "cannot read `a.json`"),
        ('[{"prompt_text": "a"}][{"prompt_text": "b"}]', "cannot read `a.json`"),
        ('{"prompt_text": "a"', "cannot read `a.json`"),
        ('[{"prompt_text": "a", "prompt_text": "b"}]', "row 1 .*has the key `prompt_text` twice"),
    ],
)
def test_a_file_of_json_is_whole_or_refused(
    store: Store, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        bring(store, path, table="tasks")
    assert store.count("tasks") == 0


def test_the_name_of_a_file_is_no_pattern(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a1.jsonl").write_text(lines({"prompt_text": "other"}))
    for name in ("a[1].jsonl", "a?.jsonl", "*.jsonl"):
        (tmp_path / name).write_text(lines({"prompt_text": name}))
        assert bring(store, tmp_path / name, table="tasks").rows == 1
    texts = set(store.scan("tasks").collect()["prompt_text"])
    assert texts == {"a[1].jsonl", "a?.jsonl", "*.jsonl"}


KILLED = """
import os, signal
from pathlib import Path
from rlake.store.files.stale_files import temporary_folder
from rlake.store.files.atomic_writer import whole
with temporary_folder() as folder, whole(Path("out.jsonl")) as part:
    (folder / "rows").write_text("rows")
    part.write_text("half")
    print(folder, part, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_command_tidies_what_a_killed_one_left(store: Store, tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    folder, part = (tmp_path / name for name in killed.stdout.split())
    assert folder.is_dir(), killed.stderr
    assert part.is_file(), killed.stderr
    path = tmp_path / "a.jsonl"
    path.write_text(lines(*ROWS))
    bring(store, path)
    assert not folder.exists()
    export(store, "chat", tmp_path / "out.jsonl")
    assert not part.exists()
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == ["a.jsonl", "out.jsonl"]
