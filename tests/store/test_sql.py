"""SQL sees all tables, can only read, and says what is wrong in our words."""

import threading
from datetime import UTC
from pathlib import Path

import polars as pl
import pytest
from builders import experiences, task

from rlake.store import Store
from rlake.store.errors import QueryError
from rlake.store.query import columns_of, tables_of
from rlake.store.schema import TABLES


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_asked(store: Store, name: str) -> None:
    assert store.sql(f"SELECT * FROM {name}").columns == list(TABLES[name].names)


def test_tables_join(store: Store) -> None:
    store.append("tasks", [task(0), task(1)])
    store.append("experiences", experiences(8, reward=[1.0, 0.0, None, 1.0]))
    found = store.sql(
        "SELECT answer, avg(reward) FROM experiences JOIN tasks USING (task_id) "
        "GROUP BY 1 ORDER BY 1"
    )
    assert found.fetchall() == [("0", 2 / 3), ("2", 2 / 3)]


def test_a_relation_becomes_polars_or_arrow_or_python_times(store: Store) -> None:
    store.append("tasks", [task(0)])
    found = store.sql("SELECT task_id, created_at FROM tasks")
    assert found.pl().schema["created_at"] == pl.Datetime("us", "UTC")
    assert found.to_arrow_table().num_rows == 1
    [(_, created_at)] = found.fetchall()
    assert created_at.utcoffset() == UTC.utcoffset(None)


def test_a_query_while_rows_of_another_are_read_says_the_way_out(store: Store) -> None:
    store.append("tasks", [task(n) for n in range(10)])
    reader = store.sql("SELECT task_id FROM tasks").to_arrow_reader(2)
    assert reader.read_next_batch().num_rows == 2
    for _ in range(2):
        with pytest.raises(QueryError, match=r"still being read; .*`\.to_arrow_table\(\)`"):
            store.sql("SELECT count(*) FROM tasks")
        store.append("tasks", [task(10)])  # the tables moved: they must be opened again
    assert reader.read_all().num_rows == 8
    assert store.sql("SELECT count(*) FROM tasks").fetchall() == [(11,)]


def test_columns_of_a_list_can_be_computed_with(store: Store) -> None:
    store.append(
        "experiences",
        experiences(3, token_ids=[1, 2], logprobs=[-1.0, -0.5], rewards={"exact": 1.0}),
    )
    found = store.sql(
        "SELECT sum(list_sum(logprobs)), sum(map_from_entries(rewards)['exact']) FROM experiences"
    )
    assert found.fetchall() == [(-4.5, 3.0)]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELEC 1", 'the query does not parse: syntax error at or near "SELEC"'),
        ("SELECT 1 FROM", "the query does not parse"),
        ("SELECT rewrad FROM experiences", "`rewrad` that is not there; did you mean `reward`"),
        ("SELECT * FROM experience", "no table or view `experience`; did you mean `experiences`"),
        ("SELECT 1; SELECT 2", "is read with one SELECT, got SELECT then SELECT"),
        ("", "is read with one SELECT, got nothing"),
        ("SELECT nosuch(1)", "not valid: Scalar Function with name nosuch does not exist"),
        ("SELECT reward + 'a' + task_id FROM experiences", "the query is not valid"),
    ],
)  # fmt: skip
def test_a_wrong_query_says_what_is_wrong(store: Store, query: str, message: str) -> None:
    with pytest.raises(QueryError) as wrong:
        store.sql(query)
    assert message in str(wrong.value)
    assert "\n" not in str(wrong.value)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.csv"
    path.write_text("word\nhidden\n")
    return path


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM '{path}'",
        "SELECT * FROM read_csv('{path}')",
        "SELECT * FROM read_text('{path}')",
        "SELECT * FROM read_blob('{path}')",
        "SELECT * FROM glob('{path}')",
        "SELECT * FROM sniff_csv('{path}')",
        "SELECT * FROM read_parquet('https://example.org/x.parquet')",
        "ATTACH '{path}.db' AS other",
        "COPY (SELECT 1) TO '{path}.out'",
        "COPY tasks FROM '{path}'",
        "EXPORT DATABASE '{path}.dir'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "RESET enable_external_access",
        "PRAGMA enable_profiling",
        "CALL pragma_version()",
        "SELECT 1; SET enable_external_access = true; SELECT 2",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{path}.out''')",
    ],
)
def test_the_console_is_closed(store: Store, secret: Path, query: str) -> None:
    with pytest.raises(Exception, match=r"read|parse|Permission") as refused:
        store.sql(query.format(path=secret)).fetchall()
    assert "hidden" not in str(refused.value)
    assert [p.name for p in secret.parent.glob("secret*")] == ["secret.csv"]


def test_variables_of_the_program_are_no_tables(store: Store) -> None:
    frame = pl.DataFrame({"word": ["hidden"]})
    with pytest.raises(QueryError, match="no table or view `frame`"):
        store.sql("SELECT * FROM frame")
    assert frame.height == 1


def test_many_threads_can_ask_while_rows_come(store: Store) -> None:
    counts: dict[int, list[int]] = {i: [] for i in range(4)}
    errors: list[BaseException] = []
    done = threading.Event()

    def ask(me: int) -> None:
        try:
            while not done.is_set() or not counts[me]:
                [(n, groups)] = store.sql(
                    "SELECT count(*), count(DISTINCT group_id) FROM experiences"
                ).fetchall()
                assert n == 4 * groups, "commits are seen whole"
                counts[me].append(n)
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in counts]
    for thread in threads:
        thread.start()
    made = experiences(40)
    for begin in range(0, 40, 4):
        store.append("experiences", made[begin : begin + 4])
    done.set()
    for thread in threads:
        thread.join(100)
    assert errors == []
    assert all(seen == sorted(seen) for seen in counts.values()), "time does not go back"
    assert store.sql("SELECT count(*) FROM experiences").fetchall() == [(40,)]


@pytest.mark.parametrize(
    ("condition", "columns", "tables"),
    [
        ("reward > 0.5", {"reward"}, set()),
        ("experiences.reward > 0 -- a remark", {"reward"}, set()),
        ("len(response_text) < 3 OR source IN ('expert')", {"response_text", "source"}, set()),
        ("true", set(), set()),
        (
            "task_id IN (SELECT task_id FROM tasks WHERE split = 'train')",
            {"task_id"},
            {"tasks"},
        ),
        (
            "EXISTS (FROM scores s WHERE s.experience_id = experiences.experience_id)",
            {"experience_id"},
            {"scores"},
        ),
        ("list_any_value(list_transform(rewards, lambda x: x.value)) > 0", {"rewards"}, set()),
    ],
)  # fmt: skip
def test_what_a_condition_reads_is_known(
    condition: str, columns: set[str], tables: set[str]
) -> None:
    assert (columns_of(condition), tables_of(condition)) == (columns, tables)


@pytest.mark.parametrize("condition", ["reward >", "1; SELECT 2", "true); SELECT (1"])
def test_what_is_no_condition_is_refused(condition: str) -> None:
    with pytest.raises(QueryError, match="`where` "):
        columns_of(condition)
