"""Join filters: queries give what they give on all rows, and read few of a large table."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import duckdb
import lance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import experiences
from support.table_rows import draw, event

from rlake.store import Store, connect
from rlake.store.join_filters import join_filters, plan, prepare
from rlake.store.query import names_read
from rlake.store.schema import TABLES

ROWS, OF_STEP = 1200, 6
INDEXED = (("experiences", "experience_id"), ("scores", "experience_id"), ("draws", "step"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store whose tables have indexes, as tables of 100,000 rows and more do."""
    store = connect(tmp_path_factory.mktemp("large") / "store")
    made = experiences(ROWS, reward=[1.0, None, 0.5, 0.0, 0.25], run_id="r")
    ids = [str(e.experience_id) for e in made]
    made = [
        replace(e, batch=i // 40, parent_id=ids[i // 2] if i % 3 else None)
        for i, e in enumerate(made)
    ]
    store.append("experiences", made)
    drawn = [draw(ids[i], 1 + i // OF_STEP, lag=i % 3, position=i) for i in range(0, ROWS // 2)]
    again = [draw(ids[-i - 1], 3, attempt=2, run_id="q", position=i) for i in range(4)]
    store.append("draws", [*drawn, *again, draw("lost", 4, position=-1)])
    store.append("job_events", [event(), event(attempt=2, start_step=90), event(run_id="q")])
    store.append("scores", [score(ids[i % 900], i) for i in range(1500)])
    for name, column in INDEXED:
        store.open_at(name).create_scalar_index(column, "BTREE")
    return connect(store.uri)


def score(experience_id: str, i: int) -> dict[str, Any]:
    return {
        "experience_id": experience_id,
        "scorer": ("strict", "kind")[i % 2],
        "scorer_version": str(i // 900),
        "value": i / 10 if i % 7 else None,
    }


@pytest.fixture(scope="module")
def planner() -> duckdb.DuckDBPyConnection:
    database = duckdb.connect(":memory:")
    prepare(database, Store.views_sql())
    return database


@pytest.fixture(scope="module")
def plain(large: Store) -> duckdb.DuckDBPyConnection:
    """DuckDB over all rows in memory, without our code."""
    con = duckdb.connect(":memory:")
    for name in TABLES:
        con.register(name, lance.dataset(f"{large.uri}/{name}.lance").to_table())
    con.execute(Store.views_sql())
    con.execute("SET TimeZone = 'UTC'")
    return con


def filters(store: Store, query: str, planner: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Return how many rows of which tables a query reads where it does not read all."""
    read = {name: store.dataset(name) for name in names_read(query) if name in TABLES}
    found = join_filters(query, read, partial(plan, database=planner))
    return {name: read[name].count_rows(filter=only) for name, only in found.items()}


def counted(rows: Iterable[tuple[Any, ...]]) -> Counter[str]:
    return Counter(map(repr, rows))


STEP = "d.step = 3 AND d.run_id = 'r'"
FEW = [
    f"SELECT avg(reward) FROM draws d JOIN experiences USING (experience_id) WHERE {STEP}",
    f"SELECT reward FROM experiences e, draws d WHERE e.experience_id = d.experience_id AND {STEP}",
    "FROM steps WHERE run_id = 'r' AND step = 3",
    "SELECT reward FROM experiences WHERE experience_id IN "
    f"(SELECT experience_id FROM draws_current d WHERE {STEP})",
    f"SELECT reward FROM experiences RIGHT JOIN (FROM draws d WHERE {STEP}) USING (experience_id)",
    f"SELECT (SELECT reward FROM experiences e WHERE e.experience_id = d.experience_id) "
    f"FROM draws d WHERE {STEP}",
    f"SELECT * FROM draws d WHERE {STEP} AND EXISTS "
    "(FROM experiences e WHERE e.experience_id = d.experience_id AND reward > 0)",
    f"SELECT position FROM draws d ANTI JOIN experiences USING (experience_id) WHERE {STEP}",
    "SELECT n FROM (SELECT experience_id, count(*) AS n FROM experiences GROUP BY ALL) "
    f"JOIN draws d USING (experience_id) WHERE {STEP}",
    "SELECT d.position FROM (SELECT DISTINCT experience_id FROM experiences) "
    f"JOIN draws d USING (experience_id) WHERE {STEP}",
    f"WITH d AS (FROM draws d WHERE {STEP}) SELECT reward FROM d JOIN experiences_current "
    "USING (experience_id) ORDER BY reward LIMIT 2",
    "SELECT reward FROM draws d JOIN experiences USING (experience_id) WHERE d.step IN (90, 91)",
    "SELECT reward FROM draws d JOIN experiences USING (experience_id) WHERE d.step <= 1",
]  # fmt: skip


@pytest.mark.parametrize("query", FEW)
def test_of_the_rows_of_a_step_no_others_are_read(
    large: Store, planner: duckdb.DuckDBPyConnection, plain: duckdb.DuckDBPyConnection, query: str
) -> None:
    read = filters(large, query, planner)
    assert 1 <= read["experiences"] <= 12, read
    assert counted(large.sql(query).fetchall()) == counted(plain.sql(query).fetchall())


def test_a_filter_leads_to_others(large: Store, planner: duckdb.DuckDBPyConnection) -> None:
    query = (
        "SELECT s.value FROM draws d JOIN experiences e USING (experience_id) "
        "LEFT JOIN scores s ON s.experience_id = e.experience_id WHERE d.step = 3"
    )
    read = filters(large, query, planner)
    assert read["experiences"] == OF_STEP + 4
    assert 1 <= read["scores"] < 30


WHOLE = [
    # rows without a match come out, or count
    f"SELECT count(*) FROM experiences LEFT JOIN (FROM draws d WHERE {STEP}) USING (experience_id)",
    f"SELECT count(*) FROM experiences ANTI JOIN (FROM draws d WHERE {STEP}) USING (experience_id)",
    f"FROM (SELECT count(*) FROM experiences), (SELECT count(*) FROM draws d WHERE {STEP})",
    f"SELECT count(*) FROM experiences FULL JOIN (FROM draws d WHERE {STEP}) USING (experience_id)",
    # a row decides about others
    "SELECT place FROM (SELECT experience_id, row_number() OVER (ORDER BY experience_id DESC) "
    f"AS place FROM experiences) JOIN draws d USING (experience_id) WHERE {STEP}",
    "FROM (SELECT experience_id FROM experiences ORDER BY ALL DESC LIMIT 9) "
    "JOIN draws d USING (experience_id) WHERE d.step = 3",
    "FROM (SELECT DISTINCT ON (group_id) group_id, experience_id FROM experiences "
    "ORDER BY experience_id DESC) JOIN draws d USING (experience_id) WHERE d.step = 4",
    "SELECT e.m FROM (SELECT max(experience_id) AS m FROM experiences) e JOIN draws d "
    f"ON e.m = d.experience_id WHERE {STEP}",
    # another column, a computed one, or another place of the same table
    f"SELECT count(*) FROM experiences e JOIN draws d ON e.batch = d.step WHERE {STEP}",
    "SELECT count(*) FROM (SELECT group_id || '/00' AS experience_id FROM experiences) "
    f"JOIN draws d USING (experience_id) WHERE {STEP}",
    "SELECT count(*) FROM draws d JOIN experiences e USING (experience_id), "
    f"experiences other WHERE {STEP} AND other.batch = e.batch",
    "SELECT count(*) FROM draws d JOIN experiences e ON e.experience_id <= d.experience_id "
    f"WHERE {STEP}",
    # more rows than looking them up is worth
    "SELECT count(*) FROM draws d JOIN experiences USING (experience_id) WHERE d.step < 50",
    "SELECT count(*) FROM draws d JOIN experiences USING (experience_id)",
]


@pytest.mark.parametrize("query", WHOLE)
def test_what_other_rows_count_in_is_read_whole(
    large: Store, planner: duckdb.DuckDBPyConnection, plain: duckdb.DuckDBPyConnection, query: str
) -> None:
    assert "experiences" not in filters(large, query, planner)
    assert counted(large.sql(query).fetchall()) == counted(plain.sql(query).fetchall())


SIDES = st.sampled_from(
    [
        "draws", "draws_current", "experiences", "experiences_current", "scores", "scores_current",
        "(SELECT experience_id, parent_id, count(*) AS n FROM experiences GROUP BY ALL)",
        "(SELECT experience_id, max(value) AS top FROM scores GROUP BY ROLLUP (experience_id))",
        "(SELECT experience_id, row_number() OVER (PARTITION BY experience_id ORDER BY step) "
        "AS place FROM draws)",
        "(SELECT experience_id, rank() OVER (PARTITION BY scorer ORDER BY value DESC) AS place "
        "FROM scores)",
        "(SELECT DISTINCT ON (experience_id) experience_id, 1 AS one FROM draws)",
        "(SELECT DISTINCT ON (reward) reward, experience_id FROM experiences "
        "ORDER BY experience_id)",
        "(SELECT parent_id AS experience_id, experience_id AS child FROM experiences)",
        "(SELECT experience_id FROM draws UNION ALL SELECT NULL)",
        "(SELECT experience_id FROM scores EXCEPT SELECT experience_id FROM draws)",
        "(SELECT experience_id FROM experiences ORDER BY experience_id DESC LIMIT 700)",
    ]
)  # fmt: skip
ON = st.sampled_from(
    ["{a}.experience_id = {b}.experience_id", "{b}.experience_id = {a}.experience_id",
     "{a}.experience_id IS NOT DISTINCT FROM {b}.experience_id",
     "{a}.experience_id = {b}.experience_id AND {a}.experience_id > 'g010'",
]
)  # fmt: skip
JOINS = st.sampled_from(
    [*["JOIN"] * 4, "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "SEMI JOIN", "ANTI JOIN"]
)
LIMITED = st.sampled_from(
    ["(FROM draws WHERE step = 3)", "(FROM draws WHERE step IN (3, 4) AND run_id = 'r')",
     "(FROM draws_current WHERE step = 3 AND lag < 2)",
     "(FROM scores WHERE experience_id = 'g004/01')",
     "(FROM experiences WHERE experience_id = 'g004/01')"]
)  # fmt: skip
ASKED = st.sampled_from(
    ["WHERE {a}.experience_id IN (SELECT experience_id FROM {w})",
     "WHERE {a}.experience_id NOT IN (SELECT experience_id FROM {w})",
     "WHERE EXISTS (FROM {w} w WHERE w.experience_id = {a}.experience_id)",
     "WHERE NOT EXISTS (FROM {w} w WHERE w.experience_id = {a}.experience_id)",
     "WHERE {a}.experience_id > (SELECT min(experience_id) FROM {w})", "", "", ""]
)  # fmt: skip


@st.composite
def queries(draw: st.DrawFn) -> str:
    """A SELECT with joins of all kinds, in any order, and subqueries."""
    sides = draw(st.permutations([draw(LIMITED), *draw(st.lists(SIDES, min_size=1, max_size=2))]))
    text, seen = f"{sides[0]} t0", "t0"
    for i, side in enumerate(sides[1:], 1):
        join, on = draw(JOINS), draw(ON).format(a=seen, b=f"t{i}")
        text += f" {join} {side} t{i} ON ({on})"
        if join not in {"SEMI JOIN", "ANTI JOIN"}:
            seen = draw(st.sampled_from([seen, f"t{i}"]))
    asked = draw(ASKED).format(a=seen, w=draw(st.one_of(LIMITED, SIDES)))
    return f"SELECT {seen}.*, count(*) OVER () FROM {text} {asked}"


@pytest.mark.slow
def test_any_query_gives_what_it_gives_on_all_rows(
    large: Store, planner: duckdb.DuckDBPyConnection, plain: duckdb.DuckDBPyConnection
) -> None:
    filtered: list[str] = []

    @settings(max_examples=200)
    @given(queries())
    def check(query: str) -> None:
        if filters(large, query, planner):
            filtered.append(query)
        assert counted(large.sql(query).fetchall()) == counted(plain.sql(query).fetchall())

    check()
    assert len(filtered) >= 30, "the queries are such that filters are found"


def test_rows_of_a_relation_are_those_of_its_query_after_another(large: Store) -> None:
    query = "SELECT count(*) FROM draws d JOIN experiences USING (experience_id) WHERE d.step = {}"
    first = large.sql(query.format(3))
    second = large.sql(query.format(90))
    assert (second.fetchall(), first.fetchall()) == ([(OF_STEP,)], [(OF_STEP + 4,)])


def test_rows_that_came_after_the_index_are_read_too(large: Store) -> None:
    branch = large.branch("later")
    branch.append("experiences", experiences(1, experience_id="new", reward=7.0))
    branch.append("draws", [draw("new", 5000)])
    query = "SELECT reward FROM draws d JOIN experiences USING (experience_id) WHERE d.step = 5000"
    assert branch.sql(query).fetchall() == [(7.0,)]
    assert large.sql(query).fetchall() == []
