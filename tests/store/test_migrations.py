"""Stores of an older schema open, are brought up to date, and their past reads as it did."""

import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from support.builders import experiences, task
from support.later_schema import LATER_COLUMNS, LATER_TABLES, LATER_VERSION, plant
from support.processes import said, start
from support.table_rows import draw

from rlake.store import Store, connect, marker
from rlake.store.errors import NotAStoreError, StoreError
from rlake.store.ids import row_digests
from rlake.store.replay import Sampler
from rlake.store.schema import TABLES, Table
from rlake.store.snapshots import restore
from rlake.store.validate import conform

FIRST_TABLES = tuple(name for name in TABLES if name not in LATER_TABLES)

MAKER = "import sys, rlake; print('go', flush=True); rlake.connect(sys.argv[1])"


def first_schema(table: Table) -> pa.Schema:
    """The schema that a table had in version 1."""
    names = [c.name for c in table.columns if c.name not in LATER_COLUMNS.get(table.name, ())]
    meta = {"rlake.table": table.name, "rlake.schema_version": "1"}
    return pa.schema([table.schema.field(name) for name in names], metadata=meta)


def write(folder: Path, name: str, data: Any) -> lance.LanceDataset:
    """Append rows as rlake of schema 1 did."""
    schema = first_schema(TABLES[name])
    rows = conform(TABLES[name], data).select(schema.names).cast(schema)
    written = lance.write_dataset(rows, f"{folder}/{name}.lance", mode="append")
    assert isinstance(written, lance.LanceDataset)
    return written


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of schema 1 with rows, a snapshot `before`, and rows after it; schema 2 opens it."""
    plant(monkeypatch)
    folder = tmp_path / "old"
    for name in FIRST_TABLES:
        lance.LanceDataset.commit(
            f"{folder}/{name}.lance",
            lance.LanceOperation.Overwrite(first_schema(TABLES[name]), []),
            enable_stable_row_ids=True,
        )
    write(folder, "tasks", [task(0)])
    write(folder, "experiences", experiences(4, reward=1.0, token_ids=[1, 2]))
    write(folder, "draws", [draw("g000/00")])
    versions = {n: lance.dataset(f"{folder}/{n}.lance").version for n in FIRST_TABLES}
    tables = [{"name": n, "version": v} for n, v in versions.items()]
    for name, version in versions.items():
        lance.dataset(f"{folder}/{name}.lance").tags.create("snapshot-before", version)
    write(folder, "snapshots", [{"name": "before", "tables": tables}])
    write(folder, "experiences", experiences(8, reward=1.0, token_ids=[1, 2])[4:])
    return folder


def version_of(folder: Path, name: str) -> int:
    meta = lance.dataset(f"{folder}/{name}.lance").schema.metadata or {}
    return int(meta[b"rlake.schema_version"])


def check(lake: Store) -> None:
    """Check that a store is up to date in each table, and holds what the old one held."""
    for name, declared in TABLES.items():
        schema = lake.dataset(name).schema
        assert set(schema.names) == set(declared.names), name
        assert {f.name: f.type for f in schema} == {f.name: f.type for f in declared.schema}, name
        assert int((schema.metadata or {})[b"rlake.schema_version"]) == LATER_VERSION, name
    assert (lake.count("experiences"), lake.count("draws"), lake.count("tasks")) == (8, 1, 1)
    assert lake.sql("SELECT count(tokenizer), count(*) FROM experiences").fetchall() == [(0, 8)]


def test_a_store_of_schema_1_is_brought_up_to_date_once(old: Path) -> None:
    check(connect(old))
    versions = connect(old).versions()
    assert connect(old).versions() == versions, "there is nothing left to do"


def test_what_a_migrated_store_holds_it_still_knows(old: Path) -> None:
    lake = connect(old)
    assert lake.append("experiences", experiences(8, reward=1.0, token_ids=[1, 2])).duplicates == 8
    new = experiences(12, reward=1.0, token_ids=[1, 2], tokenizer="t")[8:]
    assert lake.append("experiences", new).rows == 4
    told = lake.sql("SELECT tokenizer, count(*) FROM experiences GROUP BY ALL ORDER BY ALL")
    assert told.fetchall() == [("t", 4), (None, 8)]


def test_no_file_is_rewritten(old: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in old.rglob("*.lance") if p.is_file()}
    connect(old)
    after = {p: p.stat().st_mtime_ns for p in old.rglob("*.lance") if p.is_file()}
    assert after == before


def test_an_old_snapshot_reads_the_same_digests(old: Path) -> None:
    names = first_schema(TABLES["experiences"]).names

    def digests(dataset: lance.LanceDataset) -> list[str]:
        return row_digests(dataset.to_table(columns=names))

    version = lance.dataset(f"{old}/experiences.lance").tags.list()["snapshot-before"]["version"]
    before = digests(lance.dataset(f"{old}/experiences.lance", version=version))
    lake = connect(old)
    lake.append("experiences", experiences(12, reward=1.0, tokenizer="t")[8:])
    assert digests(lake.at("before").dataset("experiences")) == before


def test_an_old_snapshot_answers_with_null_in_new_columns(old: Path) -> None:
    lake = connect(old)
    lake.append("experiences", experiences(12, reward=1.0, tokenizer="t")[8:])
    past = lake.at("before")
    query = "SELECT count(*), count(tokenizer) FROM experiences"
    assert past.sql(query).fetchall() == [(4, 0)]
    assert past.sql("SELECT source, drawn_from FROM draws").fetchall() == [(None, None)]
    frame = past.scan("experiences").collect()
    assert set(frame.columns) == set(TABLES["experiences"].names)
    assert frame["tokenizer"].null_count() == frame.height == 4
    assert past.scan("draws").collect().schema == lake.scan("draws").collect().schema
    assert lake.sql(query).fetchall() == [(12, 4)], "the present is as it was"


def test_rows_of_an_old_snapshot_are_drawn_with_null_in_new_columns(old: Path) -> None:
    sampler = Sampler(connect(old).at("before"))
    drawn = sampler.draw(3, step=1, policy_version=0)
    assert drawn is not None
    rows = sampler.read(drawn, ["experience_id", "temperature", "reward"])
    assert (rows.height, rows["temperature"].null_count()) == (3, 3)
    assert rows["reward"].to_list() == [1.0] * 3


def test_an_old_snapshot_shows_tables_empty_that_came_later(old: Path) -> None:
    lake = connect(old)
    lake.append(
        "experience_values", [{"experience_id": "e", "name": "n", "version": "1", "value": 1.0}]
    )
    for n in range(3):
        lake.append("experience_values", [{"experience_id": f"{n}", "name": "n", "version": "1"}])
    lake.maintain(grace=0.0)
    assert lake.at("before").count("experience_values") == 0
    assert lake.at("before").sql("SELECT count(*) FROM experience_values").fetchall() == [(0,)]
    assert lake.count("experience_values") == 4


def test_every_view_works_at_an_old_snapshot(old: Path) -> None:
    past = connect(old).at("before")
    views = past.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal")
    names = [name for (name,) in views.fetchall()]
    assert "groups" in names
    for name in names:
        past.sql(f"SELECT * FROM {name}").fetchall()
    assert past.sql("SELECT num_rollouts, num_passed FROM groups").fetchall() == [(4, 4)]


def test_a_migration_that_was_cut_short_is_finished(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut it after each single commit, and open the store again each time."""
    done = 0
    for method in ("add_columns", "update_schema_metadata"):
        plain = getattr(lance.LanceDataset, method)

        def cut(self: lance.LanceDataset, *args: Any, plain: Any = plain, **more: Any) -> Any:
            nonlocal done
            done += 1
            result = plain(self, *args, **more)
            raise OSError("killed here") from (result if isinstance(result, Exception) else None)

        monkeypatch.setattr(lance.LanceDataset, method, cut)
    tries = 0
    while version_of(old, "job_events") < LATER_VERSION:
        tries += 1
        assert tries < 100
        with pytest.raises(StoreError, match="up to date: killed here; what it holds is untouched"):
            connect(old)
    assert done == tries > len(FIRST_TABLES)
    monkeypatch.undo()
    plant(monkeypatch)
    check(connect(old))


def test_a_process_killed_while_it_migrates_leaves_a_store_that_opens(old: Path) -> None:
    process = start(f"from support.later_schema import plant; plant(); {MAKER}", old)
    said(process)
    deadline = time.monotonic() + 100
    while version_of(old, "tasks") < LATER_VERSION and version_of(old, "draws") < LATER_VERSION:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.communicate()
    check(connect(old))


def test_two_that_open_it_at_once_migrate_it_once(old: Path) -> None:
    stores: list[Store] = []
    threads = [threading.Thread(target=lambda: stores.append(connect(old))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(stores) == 4
    check(connect(old))


def test_a_writer_of_the_older_version_goes_on(old: Path) -> None:
    lake = connect(old)
    write(old, "experiences", experiences(12, reward=1.0)[8:])
    assert lake.count("experiences") == 12
    assert lake.append("experiences", experiences(12, reward=1.0)[8:]).duplicates == 4
    assert lake.sql("SELECT count(tokenizer) FROM experiences").fetchall() == [(0,)]


@pytest.mark.parametrize("part", ["", "_versions", "_transactions"])
def test_a_table_that_was_half_made_is_made(tmp_path: Path, part: str) -> None:
    marker.put(connect(tmp_path / "lake"))
    for name in ("experiences", "job_events"):
        shutil.rmtree(tmp_path / "lake" / f"{name}.lance")
        (tmp_path / "lake" / f"{name}.lance" / part).mkdir(parents=True)
    lake = connect(tmp_path / "lake")
    assert lake.append("experiences", experiences(4)).rows == 4
    assert connect(tmp_path / "lake").versions() == lake.versions()


def test_a_table_whose_versions_are_lost_is_not_made_anew(tmp_path: Path) -> None:
    lake = connect(tmp_path / "lake")
    lake.append("experiences", experiences(4))
    shutil.rmtree(tmp_path / "lake" / "experiences.lance" / "_versions")
    shutil.rmtree(tmp_path / "lake" / "job_events.lance")
    with pytest.raises(StoreError, match="cannot open table `experiences`"):
        connect(tmp_path / "lake")


@pytest.mark.parametrize("tables", [1, 7, len(TABLES) - 1])
def test_a_store_whose_maker_was_killed_opens(tmp_path: Path, tables: int) -> None:
    lake = tmp_path / "lake"
    process = start(MAKER, lake)
    said(process)
    deadline = time.monotonic() + 100
    while len(list(lake.glob("*.lance"))) < tables and process.poll() is None:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.communicate()
    opened = connect(lake)
    assert set(opened.versions()) == set(TABLES)
    assert opened.append("tasks", [task(0)]).rows == 1


def test_a_branch_at_a_snapshot_of_an_older_schema_takes_rows_of_the_new_one(old: Path) -> None:
    lake = connect(old)
    trial = lake.branch("trial", at="before")
    made = experiences(8, reward=1.0, token_ids=[1, 2])
    assert (trial.count("experiences"), trial.count("experience_values")) == (4, 0)
    assert trial.append("experiences", made).rows == 4
    trial.append("experience_values", [{"experience_id": "g000/00", "name": "n", "version": "1"}])
    check(trial)


def test_a_store_restored_to_an_older_schema_is_up_to_date(old: Path) -> None:
    lake = connect(old)
    lake.append("experience_values", [{"experience_id": "g000/00", "name": "n", "version": "1"}])
    undo = restore(lake, "before").undo
    assert (lake.count("experiences"), lake.count("experience_values")) == (4, 0)
    assert lake.append("experiences", experiences(8, reward=1.0, token_ids=[1, 2])).rows == 4
    check(connect(old))
    restore(lake, undo)
    assert lake.count("experience_values") == 1
    check(connect(old))


def test_a_store_whose_columns_had_other_names_is_refused(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    store.append("experiences", experiences(2))
    renamed: Any = {"path": "batch", "name": "step"}
    store.dataset("experiences").alter_columns(renamed)
    with pytest.raises(NotAStoreError, match=r"no column `batch`; .*`rlake export`"):
        connect(tmp_path / "lake").sql("SELECT count(*) FROM experiences")
