"""The store as it was, and where a store is made."""

from pathlib import Path

import lance
import pyarrow as pa
import pytest
from support.builders import experiences, task
from support.processes import said, start, tell

from rlake.store import Store, connect
from rlake.store.errors import NotAStoreError, NotFoundError, StoreError
from rlake.store.schema import SCHEMA_VERSION, TABLES


def test_a_snapshot_shows_every_table_as_it_was(store: Store) -> None:
    store.append("tasks", [task(0)])
    store.append("experiences", experiences(4, reward=1.0))
    store.snapshot("first", note="why")
    store.append("tasks", [task(1)])
    store.append("experiences", experiences(8, reward=1.0))
    then = store.at("first")
    counted = "SELECT (SELECT count(*) FROM tasks), (SELECT count(*) FROM groups)"
    assert (then.count("tasks"), then.count("experiences")) == (1, 4)
    assert then.scan("experiences").collect().height == 4
    assert then.sql(counted).fetchall() == [(1, 1)]
    assert store.sql(counted).fetchall() == [(2, 2)]
    assert then.sql(counted).fetchall() == [(1, 1)], "the present did not leak into the past"
    [row] = store.scan("snapshots").collect().to_dicts()
    assert (row["name"], row["note"]) == ("first", "why")
    assert {p["name"]: p["version"] for p in row["tables"]} == then.versions()


def test_a_store_at_versions_keeps_them(store: Store) -> None:
    versions = []
    for n in range(4):
        versions.append(store.versions())
        store.append("tasks", [task(n)])
    assert [store.at(v).count("tasks") for v in versions] == [0, 1, 2, 3]
    assert [store.at({"tasks": v["tasks"]}).count("tasks") for v in versions] == [0, 1, 2, 3]
    assert store.at(versions[2]).versions() == versions[2]


def test_the_past_has_a_past(store: Store) -> None:
    store.append("tasks", [task(0)])
    store.snapshot("one")
    store.append("tasks", [task(1)])
    store.snapshot("two")
    assert store.at("two").at("one").count("tasks") == 1
    with pytest.raises(NotFoundError, match=r"no snapshot `two`; (did you mean|known are) `one`"):
        store.at("two").at("two")


def test_the_past_is_the_same_for_another_process_and_after_maintenance(store: Store) -> None:
    for n in range(8):
        store.append("tasks", [task(n)])
        if n == 3:
            store.snapshot("middle")
    before = store.scan("tasks").collect().sort("task_id")
    cared = store.maintain()["tasks"]
    assert (cared.before.fragments, cared.after.fragments) == (8, 1)
    assert store.scan("tasks").collect().sort("task_id").equals(before)
    assert connect(store.uri).at("middle").count("tasks") == 4
    assert store.at("middle").sql("SELECT count(*) FROM tasks").fetchall() == [(4,)]


def test_what_is_not_there_is_named_with_the_nearest(store: Store) -> None:
    store.snapshot("first")
    with pytest.raises(NotFoundError, match="no snapshot `frist`; did you mean `first`"):
        store.at("frist")
    with pytest.raises(NotFoundError, match="no table `task`; did you mean `tasks`"):
        store.at({"task": 1})
    with pytest.raises(NotFoundError, match="`tasks` has no version 9, newest is 1"):
        store.at({"tasks": 9})


def test_a_store_is_not_made_where_something_else_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(NotAStoreError, match=r"is not a store: it holds 1 other .*`thesis.tex`"):
        connect(tmp_path)
    with pytest.raises(NotAStoreError, match="is a file, expected the folder"):
        connect(tmp_path / "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["tasks", "job_events"])
@pytest.mark.parametrize(
    ("version", "words"),
    [(None, "that rlake did not make"), (SCHEMA_VERSION + 1, f"has schema {SCHEMA_VERSION + 1}")],
)
def test_nothing_is_made_beside_a_table_of_someone_else_or_of_a_newer_schema(
    tmp_path: Path, name: str, version: int | None, words: str
) -> None:
    metadata = {"rlake.schema_version": str(version)} if version else {}
    theirs = pa.schema([("todo", pa.string())], metadata=metadata)
    lance.write_dataset(theirs.empty_table(), str(tmp_path / f"{name}.lance"))
    with pytest.raises(NotAStoreError, match=words):
        connect(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f"{name}.lance"]


OPENERS = """
import sys
import rlake
from rlake.store import Task
print("ready", flush=True)
for line in sys.stdin:
    place, me = line.split()
    try:
        rlake.connect(place).append("tasks", [Task.ask(me)])
        print("stored", flush=True)
    except Exception as error:
        print(repr(error), flush=True)
"""


def opened_at_once(places: list[str]) -> list[list[str]]:
    """Let three processes open each place at the same time and append a row; what they said."""
    openers, told = [start(OPENERS) for _ in range(3)], []
    try:
        assert [said(opener) for opener in openers] == ["ready"] * 3
        for place in places:
            for me, opener in enumerate(openers):
                tell(opener, f"{place} {me}")
            told.append([said(opener) for opener in openers])
    finally:
        for opener in openers:
            opener.communicate()
    return told


@pytest.mark.parametrize(
    "scheme", ["", pytest.param("file://", marks=pytest.mark.slow)], ids=["local", "without a lock"]
)
def test_processes_that_make_one_store_at_once_share_it(tmp_path: Path, scheme: str) -> None:
    places = [f"{scheme}{tmp_path}/{i}" for i in range(10)]
    assert opened_at_once(places) == [["stored"] * 3] * len(places)
    for place in places:
        store = connect(place)
        assert sorted(store.scan("tasks").collect()["prompt_text"]) == ["0", "1", "2"]
        assert store.versions() == dict.fromkeys(TABLES, 1) | {"tasks": 4}


def test_a_folder_that_holds_only_locks_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / ".locks").mkdir()
    with pytest.raises(NotAStoreError, match="no store at"):
        connect(tmp_path, create=False)
    assert connect(tmp_path).count("tasks") == 0


def test_a_store_that_must_be_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError, match="no store at"):
        connect(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_a_table_that_is_gone_is_named(store: Store) -> None:
    assert store.folder is not None
    gone = store.folder / "tasks.lance"
    gone.rename(gone.with_name("elsewhere"))
    with pytest.raises(StoreError, match="cannot open table `tasks`"):
        Store(store.uri).count("tasks")
