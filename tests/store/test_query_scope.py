"""A scope ends the queries of a block, by another thread or after a time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.studio import HOUR

from rlake.store import Store
from rlake.store.errors import QueryError, StarvedError
from rlake.store.query_scope import QueryScope, check

COUNT = "SELECT count(*) FROM tasks"


def of_queries(store: Store) -> None:
    store.sql(COUNT).fetchall()
    store.sql(HOUR).fetchall()


def of_many_queries(store: Store) -> None:
    while True:
        store.sql(COUNT).fetchall()


def of_batches(store: Store) -> None:
    for _ in store.sql("SELECT * FROM range(10000000000)").to_arrow_reader(100_000):
        pass


def of_no_query(_: Store) -> None:
    while True:
        check()


ENDLESS = [of_queries, of_many_queries, of_batches, of_no_query]


@pytest.mark.parametrize("endless", ENDLESS)
def test_another_thread_ends_what_a_scope_does(
    store: Store, endless: Callable[[Store], None]
) -> None:
    scope, entered = QueryScope(), threading.Event()

    def run() -> None:
        with scope:
            entered.set()
            endless(store)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        assert entered.wait(30)
        scope.cancel()
        # bounded: an interrupt takes milliseconds
        assert isinstance(future.exception(timeout=60), StarvedError)
        assert str(future.exception()) == "the query was cancelled"
        after = pool.submit(lambda: store.sql(COUNT).fetchall())
        assert after.result(timeout=60) == [(0,)], "the thread's next query is its own"


@pytest.mark.parametrize("endless", ENDLESS)
def test_the_time_of_a_scope_is_that_of_all_it_does(
    store: Store, endless: Callable[[Store], None]
) -> None:
    told = r"^it took longer than it was given \(0\.2 s\); ask for less"
    with pytest.raises(StarvedError, match=told), QueryScope(0.2, what="it"):
        endless(store)
    check()


def test_what_was_cancelled_before_it_began_does_nothing(store: Store) -> None:
    scope = QueryScope()
    scope.cancel()
    with pytest.raises(StarvedError, match="was cancelled"), scope:
        pytest.fail("the block was entered")
    assert store.sql(COUNT).fetchall() == [(0,)]


def test_errors_of_a_scope_that_is_not_cancelled_are_its_own(store: Store) -> None:
    with pytest.raises(QueryError, match="no table or view"), QueryScope(30):
        store.sql("SELECT * FROM nothing")
