"""Imports from databases and from datasets: a real PostgreSQL, SQLite, and the package datasets."""

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset
from support import postgres

from rlake.loop import cli
from rlake.store import Store
from rlake.store.errors import ConfigError, InputError, QueryError
from rlake.store.files import import_file
from rlake.store.files.remote import shown

TASKS = "SELECT question AS prompt_text, answer FROM input"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[postgres.Postgres]:
    with postgres.running(tmp_path_factory.mktemp("postgres")) as one:
        one.sql(
            "CREATE TABLE sums (question text, answer text, score float8, price numeric, "
            "tags jsonb, made timestamptz); "
            "INSERT INTO sums VALUES "
            "('1+1=', '2', 0.5, 12.50, '{\"a\": [1]}', '2026-01-02 03:04Z'), "
            "('2+2=', NULL, NULL, NULL, NULL, NULL); "
            "CREATE SCHEMA other; CREATE TABLE other.games AS SELECT 'g' AS question, 'h' AS answer"
        )
        yield one


def questions(store: Store) -> list[tuple[object, ...]]:
    return store.sql("SELECT prompt_text, answer, taskset FROM tasks ORDER BY 1").fetchall()


def test_a_table_of_postgres_is_imported_once(store: Store, server: postgres.Postgres) -> None:
    source = f"{server.uri}#sums"
    done = import_file(store, source, "tasks", sql=TASKS)
    assert questions(store) == [("1+1=", "2", "sums"), ("2+2=", None, "sums")]
    assert done.rows == 2
    assert import_file(store, source, "tasks", sql=TASKS).rows == 0
    [(named,)] = store.sql("SELECT DISTINCT source FROM lineage").fetchall()
    assert named == f"file postgresql://127.0.0.1:{server.port}/lab#sums"


def test_a_select_runs_in_postgres_and_keeps_its_types(
    store: Store, server: postgres.Postgres
) -> None:
    source = (
        f"{server.uri}#SELECT question, answer, score, price::float8 AS price, tags, made "
        "FROM sums WHERE answer IS NOT NULL"
    )
    sql = (
        "SELECT question AS prompt_text, answer, {'score': score, 'price': price, "
        "'deep': tags->'a', 'year': year(made)} AS metadata FROM input"
    )
    import_file(store, source, "tasks", sql=sql, taskset="mine")
    [(metadata,)] = store.sql("SELECT metadata FROM tasks").fetchall()
    assert metadata.replace(" ", "") == '{"score":0.5,"price":12.5,"deep":[1],"year":2026}'
    import_file(store, f"{server.uri}#other.games", "tasks", sql=TASKS)
    assert ("g", "h", "games") in questions(store)


def test_a_database_is_not_changed_and_wrong_names_are_said(
    store: Store, server: postgres.Postgres
) -> None:
    deleting = "WITH gone AS (DELETE FROM sums RETURNING *) SELECT * FROM gone"
    for part, error in (
        ("#" + deleting, "read-only transaction"),
        ("#smus", "no table `smus`; did you mean `sums`"),
        ("", "has `other.games`, `sums`; name one as"),
        ("#SELECT nothing FROM sums", 'column "nothing" does not exist'),
    ):
        with pytest.raises(InputError, match=error) as raised:
            import_file(store, server.uri + part, "tasks", sql=TASKS)
        assert "secret" not in str(raised.value)
    wrong = server.uri.replace("secret", "secrets") + "#sums"
    with pytest.raises(InputError, match=r"cannot read `postgresql://127.*authentication failed"):
        import_file(store, wrong, "tasks", sql=TASKS)
    with pytest.raises(QueryError, match="the SELECT over `input`"):
        import_file(store, f"{server.uri}#sums", "tasks", sql="SELECT nothing FROM input")
    assert server.sql("SELECT count(*) FROM sums") == ["2"]
    assert store.count("tasks") == 0


@pytest.mark.timeout(120)
def test_a_database_that_goes_away_while_it_is_read_leaves_nothing(
    store: Store, tmp_path: Path
) -> None:
    with postgres.running(tmp_path / "own") as server:
        # a thousand rows a second, for a quarter of an hour
        slow = (
            "SELECT 'q' || i || coalesce(pg_sleep(0.001)::text, '') AS question, i::text AS answer "
            "FROM generate_series(1, 1000000) i"
        )
        found: list[BaseException] = []

        def read() -> None:
            try:
                import_file(store, f"{server.uri}#{slow}", "tasks", sql=TASKS)
            except BaseException as error:  # noqa: BLE001 - looked at below
                found.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        active = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(0.001)%'"
        deadline = time.monotonic() + 60
        while server.sql(f"{active} AND query NOT LIKE '%pg_stat_activity%'") == ["0"]:
            assert time.monotonic() < deadline, "the import never asked the database"
            assert not found, found
        server.kill()
        thread.join(60)
        assert not thread.is_alive(), "the import waits for a database that is gone"
    [error] = found
    assert isinstance(error, InputError)
    assert "nothing was imported" in str(error)
    assert store.count("tasks") == 0
    assert store.count("lineage") == 0


def test_sqlite_is_read_by_its_address(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "lab.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE sums (question TEXT, answer TEXT)")
        database.execute("INSERT INTO sums VALUES ('1+1=', '2')")
    database.close()
    before = path.read_bytes()
    import_file(store, f"sqlite:///{path}", "tasks", sql=TASKS)
    assert questions(store) == [("1+1=", "2", "sums")]
    deleting = "WITH x AS (SELECT 1) DELETE FROM sums"
    with pytest.raises(InputError, match="nothing was imported"):
        import_file(store, f"sqlite:///{path}#{deleting}", "tasks", sql=TASKS)
    assert path.read_bytes() == before
    with pytest.raises(InputError, match=r"the database `.*gone.db` does not exist"):
        import_file(store, f"sqlite:///{tmp_path}/gone.db", "tasks", sql=TASKS)
    assert not (tmp_path / "gone.db").exists()


def test_a_folder_in_the_layout_of_the_hub_is_read_by_datasets(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "lab"
    splits = {
        "train": Dataset.from_dict({"question": ["1+1="], "answer": ["2"]}),
        "test": Dataset.from_dict({"question": ["2+2="], "answer": ["4"]}),
    }
    (folder / "data").mkdir(parents=True)
    for name, rows in splits.items():
        rows.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    with pytest.raises(ConfigError, match=r"has the splits `train`, `test`; choose one with"):
        import_file(store, folder, "tasks", sql=TASKS)
    import_file(store, folder, "tasks", sql=TASKS, split="test")
    assert questions(store) == [("2+2=", "4", "lab")]
    with pytest.raises(ConfigError, match="has no split `tets`; did you mean `test`"):
        import_file(store, folder, "tasks", sql=TASKS, split="tets")


def test_an_address_that_cannot_be_read_says_what_can(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"`mysql://h/db`, expected a file or one of `postgresql"):
        import_file(store, "mysql://me:secret@h/db", "tasks")
    with pytest.raises(ConfigError, match=r"`PostgreSQL://h/db`, expected a file or one of"):
        import_file(store, "PostgreSQL://me:secret@h/db", "tasks")
    with pytest.raises(InputError, match="needs the package `modelscope`; install it"):
        import_file(store, "modelscope://owner/name", "tasks")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="cannot read the dataset `owner/name`"):
        import_file(store, "hf://owner/name", "tasks")


@pytest.mark.parametrize("password", ["p@secret", "a/secret", "secret#1", "a?secret", "secret%zz"])
def test_a_password_that_is_not_percent_encoded_is_never_printed(
    store: Store, password: str
) -> None:
    address = f"postgresql://me:{password}@127.0.0.1:1/lab#sums"
    assert shown(address) == "postgresql://127.0.0.1:1/lab#sums"
    with pytest.raises(ConfigError, match="expected it percent-encoded; write") as raised:
        import_file(store, address, "tasks", sql=TASKS)
    assert "secret" not in str(raised.value)
    assert shown("sqlite:///a@b/lab.db#t") == "sqlite:///a@b/lab.db#t"
    assert shown("hf://owner/name@main#c") == "hf://owner/name@main#c"


def test_several_sources_are_one_import(
    store: Store, tmp_path: Path, server: postgres.Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.jsonl").write_text('{"question": "3+3=", "answer": "6"}\n')
    words = ["import", "tasks", str(tmp_path / "more.jsonl"), f"{server.uri}#sums"]
    assert cli.run_command([*words, "--sql", TASKS, "--store", store.uri]) == 0
    printed = capsys.readouterr()
    assert "imported 3 tasks from" in printed.out
    assert "secret" not in printed.out + printed.err
    assert len(store.sql("SELECT DISTINCT lineage_id FROM tasks").fetchall()) == 1
    lines = [tmp_path / "more.jsonl", tmp_path / "again.jsonl"]
    lines[1].write_text('{"question": "4+4=", "answer": "8"}\n')
    assert import_file(store, lines, "tasks", sql=TASKS).rows == 1
