"""A lancedb table `user_*` in the store's folder is seen by SQL, snapshots and the doctor."""

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.builders import task

from rlake.store import Store
from rlake.store.doctor import diagnose
from rlake.store.errors import QueryError, StoreError


def by_lancedb(store: Store) -> Any:
    """A store's folder as another program opens it."""
    import lancedb  # takes 3 s, and each process of the tests reads all files

    return lancedb.connect(store.uri)


@pytest.fixture
def lake(store: Store) -> Store:
    store.append("tasks", [task(0), task(1)])
    rows = pl.DataFrame({"task_id": [task(0).task_id], "topic": ["sums"]}).to_arrow()
    by_lancedb(store).create_table("user_topics", rows)
    return store


QUERY = "SELECT topic, answer FROM user_topics JOIN tasks USING (task_id) ORDER BY 1"


def test_a_table_of_the_users_is_joined_and_follows_its_writers(lake: Store) -> None:
    assert lake.sql(QUERY).fetchall() == [("sums", "0")]
    more = pl.DataFrame({"task_id": [task(1).task_id], "topic": ["more"]}).to_arrow()
    by_lancedb(lake).open_table("user_topics").add(more)
    assert lake.sql(QUERY).fetchall() == [("more", "2"), ("sums", "0")]
    assert lake.user_versions() == {"user_topics": 2}


def test_a_snapshot_shows_it_as_it_was_and_keeps_that_version(lake: Store) -> None:
    lake.snapshot("then")
    table = by_lancedb(lake).open_table("user_topics")
    table.update(values={"topic": "other"})
    table.optimize()
    assert lake.sql(QUERY).fetchall() == [("other", "0")]
    assert lake.at("then").sql(QUERY).fetchall() == [("sums", "0")]
    assert "then" in str(table.tags.list())


def test_a_table_that_came_after_a_snapshot_is_not_in_it(store: Store) -> None:
    store.snapshot("before")
    by_lancedb(store).create_table("user_late", pl.DataFrame({"a": [1]}).to_arrow())
    assert store.sql("SELECT a FROM user_late").fetchall() == [(1,)]
    with pytest.raises(QueryError, match="no table or view `user_late`"):
        store.at("before").sql("SELECT a FROM user_late")


def test_one_that_is_removed_is_gone_and_a_broken_one_is_named(lake: Store) -> None:
    assert "user_topics" in " ".join(found.what for found in diagnose(lake))
    for manifest in Path(f"{lake.uri}/user_topics.lance/_versions").iterdir():
        manifest.unlink()
    broken = [f.what for f in diagnose(lake) if f.level == "error"]
    assert any("user_topics" in what for what in broken)
    with pytest.raises(StoreError, match="user_topics"):
        lake.sql(QUERY)
    shutil.rmtree(f"{lake.uri}/user_topics.lance")
    assert lake.sql("SELECT count(*) FROM tasks").fetchall() == [(2,)]
    with pytest.raises(QueryError, match="no table or view `user_topics`"):
        lake.sql(QUERY)
