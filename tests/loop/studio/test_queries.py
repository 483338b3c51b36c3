import asyncio
from threading import Event

import pytest
from support.builders import experiences
from support.studio import HOUR

from rlake.loop.studio.queries import Queries
from rlake.store import Store
from rlake.store.errors import QueryError, StarvedError

COUNT = "SELECT count(*) FROM experiences"


def test_browsers_share_a_query_until_its_tables_change(store: Store) -> None:
    asked: list[str] = []
    queries = Queries(store)
    sql = store.sql

    def counted(query: str, **options: object) -> object:
        asked.append(query)
        return sql(query, **options)  # pyright: ignore[reportArgumentType]

    store.sql = counted  # pyright: ignore[reportAttributeAccessIssue]

    async def look() -> list[int]:
        found = await asyncio.gather(*(queries.rows(COUNT) for _ in range(20)))
        store.append("experiences", experiences(4))
        queries.wrote()
        return [rows.rows[0][0] for rows in (*found, await queries.rows(COUNT))]

    assert asyncio.run(look()) == [0] * 20 + [4]
    assert asked == [COUNT, COUNT]
    queries.close()


def test_a_query_that_nobody_waits_for_is_interrupted(store: Store) -> None:
    queries = Queries(store)

    async def leave() -> None:
        two = [asyncio.ensure_future(queries.rows(HOUR)) for _ in range(2)]
        done, _ = await asyncio.wait(two, timeout=0.5)
        assert not done, "it takes longer than this"
        [running] = queries._running.values()  # pyright: ignore[reportPrivateUsage]
        two[0].cancel()
        await asyncio.wait([two[0]])
        running.scope.check()  # one still waits
        two[1].cancel()
        # bounded: an interrupt takes milliseconds, and the query hours
        await asyncio.wait([running.future], timeout=60)
        assert isinstance(running.future.exception(), StarvedError)
        assert (await queries.rows(COUNT)).rows == [(0,)], "the session serves the next query"

    asyncio.run(leave())
    queries.close()


def test_functions_end_with_their_queries_and_leave_the_pages_their_threads(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlake.loop.studio.queries.SECONDS", 1.0)
    queries = Queries(store)

    async def ask() -> None:
        long = [asyncio.ensure_future(queries.call(lambda: store.sql(HOUR).pl())) for _ in range(8)]
        assert (await queries.rows(COUNT)).rows == [(0,)]
        assert not any(one.done() for one in long[3:])
        found = await asyncio.gather(*long, return_exceptions=True)
        assert {type(one) for one in found} == {StarvedError}

    asyncio.run(ask())
    assert store.sql(COUNT).fetchall() == [(0,)], "the limit is of the function alone"
    queries.close()


def test_a_function_that_nobody_waits_for_ends_with_its_query(store: Store) -> None:
    queries, ended = Queries(store), Event()

    def endless() -> None:
        try:
            while True:
                store.sql(HOUR).fetchall()
        finally:
            ended.set()

    async def leave() -> None:
        audit = asyncio.ensure_future(queries.call(endless))
        done, _ = await asyncio.wait([audit], timeout=0.5)
        assert not done, "it takes longer than this"
        audit.cancel()
        assert await asyncio.to_thread(ended.wait, 60), "bounded: an interrupt takes milliseconds"
        assert await queries.call(store.count, "experiences") == 0

    asyncio.run(leave())
    queries.close()


def test_sums_of_integers_are_integers(store: Store) -> None:
    queries = Queries(store)
    query = "SELECT sum(n) AS n, sum(n)::DECIMAL(9, 2) AS m FROM range(4) t(n)"
    [(whole, part)] = asyncio.run(queries.rows(query)).rows
    assert (whole, type(whole), part, type(part)) == (6, int, 6.0, float)
    queries.close()


def test_time_and_rows_are_limited(store: Store) -> None:
    queries = Queries(store)

    async def ask() -> None:
        with pytest.raises(StarvedError, match="took longer than it was given"):
            await queries.rows(HOUR, seconds=0.2)
        found = await queries.rows("SELECT * FROM range(1000000)", limit=10)
        assert (len(found.rows), found.is_cut) == (10, True)
        assert (await queries.rows("SELECT 1 AS x, 2 AS x")).rows == [(1, 2)]

    asyncio.run(ask())
    queries.close()


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("DELETE FROM tasks", "read with one SELECT"),
        ("SELECT * FROM '/etc/passwd'", "no table or view"),
        ("SELECT * FROM experience", "did you mean `experiences`"),
    ],
)
def test_only_reads_of_the_store_run(store: Store, sql: str, told: str) -> None:
    queries = Queries(store)
    with pytest.raises(QueryError, match=told):
        asyncio.run(queries.rows(sql))
    queries.close()


def test_a_past_state_is_shown_as_it_was(store: Store) -> None:
    store.append("experiences", experiences(4))
    store.snapshot("four")
    store.append("experiences", experiences(8)[4:])
    queries = Queries(store.at("four"))
    assert asyncio.run(queries.rows(COUNT)).rows == [(4,)]
    queries.close()


def test_a_label_waits_for_no_audit_and_is_stored_for_one_who_left(store: Store) -> None:
    queries, ended, stored = Queries(store), Event(), Event()

    async def ask() -> None:
        audits = [asyncio.ensure_future(queries.call(ended.wait, 30)) for _ in range(3)]
        label = asyncio.ensure_future(queries.keep(stored.set))
        await asyncio.sleep(0)
        label.cancel()
        assert await asyncio.to_thread(stored.wait, 30), "bounded: it takes milliseconds"
        assert not any(one.done() for one in audits)
        ended.set()
        await asyncio.gather(*audits)

    asyncio.run(ask())
    queries.close()
