"""SQL sees all tables, can only read, and says what is wrong in our words."""

import threading
from datetime import UTC
from itertools import combinations
from pathlib import Path
from typing import Any

import duckdb
import lance
import polars as pl
import pytest
from support.builders import experiences, task

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


@pytest.mark.parametrize(
    "query",
    [
        "EXPLAIN ANALYZE CREATE OR REPLACE TEMP VIEW groups AS SELECT 1",
        "explain (analyze /* ) ... */) create or replace temp view groups as select 1",
        "explain (analyze) create or replace temp view groups as select 1",
        "explain /* select 1 */ analyze create or replace temp view groups as select 1",
        "/* explain */ explain analyze create or replace temp view groups as select 1",
        "explain analyze set variable x = 1",
        "explain" + "/*" * 2_000 + "*/" * 2_000 + "select 1",
        "explain analyze",
        "explain",
    ],
)
def test_an_explained_statement_must_be_a_select_of_its_own(store: Store, query: str) -> None:
    before = store.sql("SELECT * FROM groups").columns
    with pytest.raises(QueryError):
        store.sql(query)
    assert store.sql("SELECT * FROM groups").columns == before


@pytest.mark.parametrize(
    "query",
    [
        "EXPLAIN SELECT 1",
        " explain analyze\nselect count(*) from tasks",
        "EXPLAIN (ANALYZE, FORMAT json) SELECT 1",
        "explain (format json) /* why */ (select 1)",
        "EXPLAIN WITH a AS (SELECT 1 AS x) FROM a",
    ],
)
def test_a_select_is_explained(store: Store, query: str) -> None:
    assert store.sql(query).columns == ["explain_key", "explain_value"]


def test_frames_are_joined_by_name_and_forgotten_with_the_next_query(store: Store) -> None:
    store.append("tasks", [task(n) for n in range(4)])
    wanted = pl.DataFrame({"answer": ["2", "4"]})
    query = "SELECT count(*) FROM tasks JOIN wanted USING (answer)"
    frames = (wanted, wanted.lazy(), wanted.to_arrow(), wanted.to_pandas())
    assert [store.sql(query, wanted=f).fetchall() for f in frames] == [[(2,)]] * 4
    with pytest.raises(QueryError, match="no table or view `wanted`"):
        store.sql(query)


def test_what_is_not_a_frame_or_hides_a_table_is_refused(store: Store) -> None:
    with pytest.raises(QueryError, match=r"`wanted` must be a frame .*, got int"):
        store.sql("SELECT 1", wanted=3)
    for name in ("tasks", "groups", "Experiences"):
        frames: dict[str, Any] = {name: pl.DataFrame({"a": [1]})}
        with pytest.raises(QueryError, match=f"`{name}` is a table or view of the store"):
            store.sql("SELECT 1", **frames)
    assert store.sql("SELECT count(*) FROM tasks").fetchall() == [(0,)]


def test_files_are_read_only_when_the_caller_allows_it(store: Store, tmp_path: Path) -> None:
    pl.DataFrame({"answer": ["0"]}).write_parquet(tmp_path / "known.parquet")
    store.append("tasks", [task(0), task(1)])
    query = f"SELECT task_id FROM tasks JOIN '{tmp_path}/known.parquet' USING (answer)"
    with pytest.raises(QueryError):
        store.sql(query)
    assert store.sql(query, allow_files=True).fetchall() == [(task(0).task_id,)]
    with pytest.raises(QueryError):
        store.sql(query)
    with pytest.raises(QueryError, match="got COPY"):
        store.sql(f"COPY (SELECT 1) TO '{tmp_path}/out.csv'", allow_files=True)
    with pytest.raises(QueryError):
        store.sql(f"EXPLAIN ANALYZE COPY (SELECT 1) TO '{tmp_path}/out.csv'", allow_files=True)
    assert not (tmp_path / "out.csv").exists()


def test_a_python_variable_is_not_a_table(store: Store) -> None:
    hidden = pl.DataFrame({"a": [1]})
    for allow_files in (False, True):
        with pytest.raises(QueryError, match="no table or view `hidden`"):
            store.sql("SELECT * FROM hidden", allow_files=allow_files)
    assert hidden.height == 1


def test_views_are_plain_sql_for_a_duckdb_without_rlake(store: Store) -> None:
    store.append("experiences", experiences(8, reward=[1.0, 0.0, None, 1.0]))
    con = duckdb.connect()
    for name in TABLES:
        con.register(name, lance.dataset(f"{store.uri}/{name}.lance"))
    con.execute(store.views_sql())
    query = "SELECT * FROM groups ORDER BY ALL"
    assert con.sql(query).fetchall() == store.sql(query).fetchall()


def test_a_connection_of_ones_own_sees_all_tables_and_views_of_a_moment(store: Store) -> None:
    rows = experiences(8, reward=[1.0, 0.0, None, 1.0])
    store.append("experiences", rows[:4])
    con = duckdb.connect()
    con.execute("CREATE TABLE mine AS SELECT 1 AS n")
    store.register(con)
    query = "SELECT * FROM groups ORDER BY ALL"
    assert con.sql(query).fetchall() == store.sql(query).fetchall()
    assert con.sql("SELECT pass_at_k(4, 2, 1), n FROM mine").fetchall() == [(0.5, 1)]
    store.append("experiences", rows[4:])
    assert con.sql("SELECT count(*) FROM experiences").fetchall() == [(4,)]
    store.register(con)
    assert con.sql(query).fetchall() == store.sql(query).fetchall()


@pytest.mark.parametrize(("n", "c", "k"), [(8, 8, 4), (8, 5, 1), (8, 5, 3), (8, 2, 3), (8, 0, 1)])
def test_pass_hat_k_is_the_share_of_choices_that_are_all_right(
    store: Store, n: int, c: int, k: int
) -> None:
    chosen = list(combinations([True] * c + [False] * (n - c), k))
    [(found,)] = store.sql(f"SELECT pass_hat_k({n}, {c}, {k})").fetchall()
    assert found == pytest.approx(sum(map(all, chosen)) / len(chosen))
    assert store.sql(f"SELECT pass_hat_k({k - 1}, 0, {k})").fetchall() == [(None,)]
