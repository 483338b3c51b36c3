"""Append is atomic and idempotent, and a stored row never changes."""

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time_ns
from typing import Any

import lance
import polars as pl
import pytest
from support.builders import experiences, rows, task
from support.processes import said, start, tell

from rlake.store import Appended, Experience, RlakeError, Store, connect
from rlake.store.append import TRIES
from rlake.store.corruption import examine
from rlake.store.errors import BusyError, ConflictError, NotFoundError, SchemaError, StoreError


def ids(store: Store) -> list[str]:
    return store.scan("experiences").select("experience_id").collect().to_series().sort().to_list()


def test_an_append_says_what_it_did_and_is_one_commit(store: Store) -> None:
    before = store.versions()["experiences"]
    assert store.append("experiences", experiences(8)) == Appended(8, 0, before + 1)
    assert store.versions()["experiences"] == before + 1
    assert store.count("experiences") == 8


def test_a_retry_stores_nothing_twice(store: Store) -> None:
    first = store.append("experiences", experiences(8))
    assert store.append("experiences", experiences(8)) == Appended(0, 8, first.version)
    assert store.count("experiences") == 8


def test_a_retry_by_another_process_stores_nothing_twice(store: Store) -> None:
    store.append("experiences", experiences(8))
    assert connect(store.uri).append("experiences", experiences(10)).rows == 2
    assert store.append("experiences", experiences(12)) == Appended(2, 10, 4)


def test_a_retry_after_a_part_was_stored_adds_the_rest(store: Store) -> None:
    store.append("experiences", experiences(3))
    assert store.append("experiences", experiences(8)).rows == 5
    assert ids(store) == [e.experience_id for e in experiences(8)]


def test_the_time_of_a_row_is_not_its_content(store: Store) -> None:
    early = rows(experiences(2)).with_columns(created_at=datetime(2020, 1, 1, tzinfo=UTC))
    late = rows(experiences(2)).with_columns(created_at=datetime(2030, 1, 1, tzinfo=UTC))
    store.append("experiences", early)
    assert store.append("experiences", late).duplicates == 2
    stored = store.scan("experiences").select("created_at").collect().to_series()
    assert {t.year for t in stored} == {2020}, "the first one stays"


def times(store: Store, name: str = "tasks") -> list[datetime]:
    """Return the times of a table's rows, in the order in which they were stored."""
    return store.dataset(name).to_table(columns=["created_at"]).column(0).to_pylist()


def test_time_never_runs_backwards_when_a_clock_is_turned_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = datetime.now(UTC)
    for n, turn in enumerate([0, 1, -3600, -86400 * 3000, 0, 5]):
        moment = clock + timedelta(seconds=turn)
        monkeypatch.setattr("rlake.store.append.now", lambda moment=moment: moment)
        store.append("tasks", [task(3 * n), task(3 * n + 1)])
        store.append_stream("tasks", [[task(3 * n + 2)]])
    stamped = times(store)
    assert len(set(stamped)) == 18
    assert stamped == sorted(stamped)
    assert stamped[-1] < clock + timedelta(seconds=6), "and it does not run ahead"


def test_time_never_runs_backwards_from_process_to_process(store: Store) -> None:
    behind = """
import sys
from datetime import timedelta
import rlake
from rlake.store import append
clock = append.now
append.now = lambda: clock() - timedelta(days=400)
lake = rlake.connect(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    lake.append("tasks", [rlake.Task.ask(line)])
    print("done", flush=True)
"""
    process = start(behind, store.uri)
    assert said(process) == "ready"
    for n in range(3):
        store.append("tasks", [task(n)])
        tell(process, n)
        assert said(process) == "done"
    process.communicate(timeout=100)
    assert len(times(store)) == 6
    assert times(store) == sorted(times(store))


def test_time_orders_the_rows_of_one_append(store: Store) -> None:
    store.append("experiences", experiences(50))
    store.append_stream("experiences", [experiences(60)[50:55], experiences(60)[55:]])
    assert len(set(times(store, "experiences"))) == 60
    told = store.sql("SELECT experience_id FROM experiences ORDER BY created_at").fetchall()
    assert [i for (i,) in told] == [e.experience_id for e in experiences(60)]


def test_a_row_keeps_its_own_time_and_a_later_one_is_followed(store: Store) -> None:
    ahead = datetime.now(UTC) + timedelta(hours=2)
    early = datetime(2001, 1, 1, tzinfo=UTC)
    for n, time in enumerate([early, ahead]):
        store.append("tasks", [task(n).row() | {"created_at": time}])
    store.append("tasks", [task(2), task(3)])
    tick = timedelta(microseconds=1)
    assert times(store) == [early, ahead, ahead + tick, ahead + 2 * tick]


def test_a_time_in_the_far_future_is_refused_for_all_others_would_follow(store: Store) -> None:
    with pytest.raises(SchemaError, match=r"`created_at` of `tasks` is 2999-01-01 00:00, more tha"):
        store.append("tasks", [task().row() | {"created_at": datetime(2999, 1, 1, tzinfo=UTC)}])
    assert store.count("tasks") == 0


def test_a_time_that_is_null_is_that_of_the_append(store: Store) -> None:
    own = datetime(2020, 1, 1, tzinfo=UTC)
    began = datetime.now(UTC)
    store.append("tasks", [task(n).row() | {"created_at": t} for n, t in enumerate([own, None])])
    first, second = times(store)
    assert first == own
    assert began <= second <= datetime.now(UTC)


def test_ids_and_time_survive_a_table_that_was_restored(store: Store) -> None:
    for n in range(4):
        store.append("tasks", [task(n)])
    newest = times(store)[-1]
    store.open_at("tasks", 3).restore()
    assert store.append("tasks", [task(0), task(3)]) == Appended(1, 1, 7)
    assert times(store)[-1] > newest
    store.open_at("tasks", 5).restore()
    assert connect(store.uri).append("tasks", [task(2), task(4)]).rows == 1
    assert store.append("tasks", [task(n) for n in range(5)]).duplicates == 5
    assert store.count("tasks") == len(set(times(store))) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"reward": 0.5},
        {"reward": None},
        {"token_ids": [1, 2, 4]},
        {"logprobs": [0.0, 0.0, -0.5]},
        {"rewards": {"exact": 0.5}},
        {"response_text": None},
        {"messages": [{"role": "user", "content": "?"}]},
    ],
    ids=str,
)
def test_the_id_of_a_stored_row_with_other_content_is_refused(
    store: Store, change: dict[str, object]
) -> None:
    tokens = {"token_ids": [1, 2, 3], "logprobs": [0.0, 0.0, -1.0], "rewards": {"exact": 1.0}}
    made = experiences(4, reward=1.0, **tokens)
    store.append("experiences", made)
    other = [*experiences(8, reward=1.0, **tokens)[4:], replace(made[2], **change)]
    with pytest.raises(ConflictError, match=r"`experience_id` 'g000/02' is in `experiences`"):
        store.append("experiences", other)
    assert store.count("experiences") == 4, "nothing of the batch is stored"


def test_a_row_twice_in_one_batch_is_stored_once(store: Store) -> None:
    once = experiences(3)
    assert store.append("experiences", [*once, *once, once[0]]) == Appended(3, 4, 2)
    assert len(ids(store)) == 3


def test_keys_of_several_columns_are_compared_as_a_whole(store: Store) -> None:
    verdict = {"experience_id": "a", "scorer": "exact", "scorer_version": "1", "value": 1.0}
    store.append("scores", [verdict])
    store.append("scores", [verdict | {"scorer_version": "2", "value": 0.0}])
    assert store.append("scores", [verdict]).duplicates == 1
    with pytest.raises(ConflictError, match="`scorer` 'exact', `scorer_version` '2'"):
        store.append("scores", [verdict | {"scorer_version": "2"}])


def test_keys_may_hold_null(store: Store) -> None:
    drop = {"lineage_id": "l", "operator": "o", "reason": "r"}
    store.append("drops", [drop | {"task_id": "t"}, drop | {"experience_id": "t"}])
    assert store.append("drops", [drop | {"task_id": "t"}]).duplicates == 1
    assert store.count("drops") == 2


def test_ids_with_quotes_are_ids(store: Store) -> None:
    odd = [replace(e, experience_id=f'it\'s "{i}"') for i, e in enumerate(experiences(2))]
    store.append("experiences", odd)
    assert store.append("experiences", odd).duplicates == 2


def test_idempotence_survives_compaction(store: Store) -> None:
    for n in range(2, 12, 2):
        store.append("experiences", experiences(n))
    store.maintain()
    assert store.append("experiences", experiences(12)) == Appended(
        2, 10, store.versions()["experiences"]
    )
    assert connect(store.uri).append("experiences", experiences(12)).duplicates == 12


def test_idempotence_does_not_depend_on_how_ids_are_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlake.store.key_index._IN_SET", 5)
    for n in range(3, 24, 3):
        assert store.append("experiences", experiences(n)) == Appended(3, n - 3, 1 + n // 3)
    assert connect(store.uri).append("experiences", experiences(24)) == Appended(3, 21, 9)


def test_a_stream_is_one_commit(store: Store) -> None:
    made = experiences(12)
    batches = [made[0:4], rows(made[4:8]), rows(made[8:12]).to_arrow()]
    assert store.append_stream("experiences", batches) == Appended(12, 0, 2)
    assert ids(store) == [e.experience_id for e in made]


def test_a_stream_that_raises_stores_nothing(store: Store) -> None:
    def broken() -> Iterator[list[Experience]]:
        yield experiences(4)
        yield experiences(8)[4:]
        raise KeyError("the file ended")

    with pytest.raises(KeyError, match="the file ended"):
        store.append_stream("experiences", broken())
    assert store.count("experiences") == 0
    assert store.versions()["experiences"] == 1


@pytest.mark.parametrize("error", [SchemaError, ConflictError])
def test_a_bad_batch_in_a_stream_stores_nothing(store: Store, error: type[RlakeError]) -> None:
    good = experiences(4, reward=1.0)
    change = {"source": "nobody"} if error is SchemaError else {"reward": 0.0}
    with pytest.raises(error):
        store.append_stream("experiences", [good, [replace(good[1], **change)]])
    assert store.count("experiences") == 0
    assert store.append("experiences", good).rows == 4, "and leaves no trace in what is known"


def test_a_stream_knows_its_earlier_batches_and_the_stored_rows(store: Store) -> None:
    made = experiences(8)
    store.append("experiences", made[:2])
    done = store.append_stream("experiences", [made[:4], made[2:6], made])
    assert (done.rows, done.duplicates) == (6, 10)
    assert ids(store) == [e.experience_id for e in made]


def test_a_stream_is_read_batch_by_batch(store: Store) -> None:
    taken: list[int] = []

    def batches() -> Iterator[list[Experience]]:
        for i in range(20):
            taken.append(i)
            yield experiences(80)[4 * i : 4 * i + 4]
            assert len(taken) == i + 1, "nobody ran ahead"

    assert store.append_stream("experiences", batches()).rows == 80


def busy(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Let commits fail a number of times, as they do when others are faster; return the tries."""
    tries: list[int] = []
    write = lance.write_dataset

    def refused(*args: Any, **more: Any) -> Any:
        tries.append(len(tries))
        if len(tries) <= times:
            raise OSError("Retryable commit conflict for version 2: preempted")
        return write(*args, **more)

    monkeypatch.setattr(lance, "write_dataset", refused)
    return tries


def test_an_append_that_others_preempted_is_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = busy(monkeypatch, 3)
    assert store.append("tasks", [task(0), task(1)]).rows == 2
    assert (len(tries), store.count("tasks")) == (4, 2)


def test_a_store_that_stays_busy_is_said_to_be(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = busy(monkeypatch, 100)
    with pytest.raises(BusyError, match=r"`tasks`: Retryable commit conflict.*; try it again"):
        store.append("tasks", [task(0)])
    assert len(tries) == TRIES
    assert store.count("tasks") == 0


def test_what_is_wrong_with_the_rows_is_not_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append("experiences", experiences(1, reward=1.0))
    tries = busy(monkeypatch, 100)
    with pytest.raises(ConflictError):
        store.append("experiences", experiences(1, reward=0.0))
    with pytest.raises(SchemaError):
        store.append("experiences", [{"nothing": 1}])
    assert tries == []


def test_an_append_of_nothing_commits_nothing(store: Store) -> None:
    assert store.append("tasks", []) == Appended(0, 0, 1)
    assert store.append_stream("tasks", []) == Appended(0, 0, 1)
    assert store.append("tasks", pl.DataFrame()) == Appended(0, 0, 1)


def test_all_shapes_of_rows_store_the_same(store: Store) -> None:
    made = experiences(6, reward=[1.0, None])
    frame = rows(made)
    shapes = [made[0:1], [made[1].row()], frame[2:3], frame[3:4].lazy(), frame[4:5].to_arrow()]
    for shape in [*shapes, frame[5:6].to_arrow().to_batches()[0]]:
        assert store.append("experiences", shape).rows == 1
    whole = store.scan("experiences").drop("created_at", "digest").collect().sort("experience_id")
    assert whole.equals(frame.drop("created_at", "digest"))


def test_an_unknown_table_is_named_with_the_nearest(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no table `experience`; did you mean `experiences`"):
        store.append("experience", [])


def test_the_past_is_read_only(store: Store) -> None:
    past = store.at(store.versions())
    with pytest.raises(StoreError, match="read only"):
        past.append("tasks", [task()])
    assert store.count("tasks") == 0


def test_what_is_appended_is_seen_at_once_by_every_reader(store: Store) -> None:
    other = connect(store.uri)
    assert other.sql("SELECT count(*) FROM tasks").fetchall() == [(0,)]
    for n in range(1, 4):
        store.append("tasks", [task(n)])
        assert other.count("tasks") == store.count("tasks") == n
        assert other.sql("SELECT count(*) FROM tasks").fetchall() == [(n,)]


@pytest.mark.parametrize("changed", ["just now", "at a whole second", "before"])
def test_an_append_that_a_coarse_clock_hides_is_seen(store: Store, changed: str) -> None:
    """Such a clock gives the folder of versions the time that it had before the append."""
    other, versions = connect(store.uri), Path(store.uri, "tasks.lance", "_versions")
    store.append("tasks", [task(0)])
    second = time_ns() // 1_000_000_000 * 1_000_000_000
    at = {"just now": time_ns() + 1, "at a whole second": second - 5_000_000_000}.get(
        changed, second - 5_500_000_000
    )
    os.utime(versions, ns=(at, at))
    assert store.newest_version("tasks") == 2
    with pytest.MonkeyPatch.context() as patch:
        asked: list[str] = []
        patch.setattr(store, "_ask_newest", asked.append)
        store.newest_version("tasks")
    assert asked == ([] if changed == "before" else ["tasks"])
    other.append("tasks", [task(1)])
    if changed != "before":
        os.utime(versions, ns=(at, at))
    assert (store.count("tasks"), store.newest_version("tasks")) == (2, 3)


def test_nothing_of_the_store_updates_a_row() -> None:
    verbs = {name for name in dir(Store) if not name.startswith("_")}
    assert verbs.isdisjoint({"update", "delete", "merge", "upsert", "overwrite", "drop"})
    assert verbs == {
        "append", "append_stream", "append_streams", "at", "branch", "committed", "committer",
        "count", "dataset", "diff", "drop_branch",
        "folder", "is_past", "lineage", "lines", "lock_name", "maintain", "merge_branch",
        "newest_version", "on_branch", "open_at", "open_for_names", "register", "restore",
        "runs_folder", "scan", "search", "similar", "snapshot", "sql", "storage_options",
        "user_versions", "versions", "views_sql", "wait_for",
    }  # fmt: skip


@pytest.mark.parametrize(
    "query",
    [
        "UPDATE experiences SET reward = 1",
        "DELETE FROM experiences",
        "INSERT INTO experiences SELECT * FROM experiences",
        "DROP TABLE experiences",
        "CREATE TABLE t AS SELECT 1",
        "CREATE OR REPLACE VIEW groups AS SELECT 1",
        "TRUNCATE experiences",
        "ALTER TABLE experiences RENAME TO e",
    ],
)
def test_sql_that_writes_is_refused(store: Store, query: str) -> None:
    store.append("experiences", experiences(2, reward=0.0))
    with pytest.raises(ValueError, match="is read with one SELECT"):
        store.sql(query)
    assert store.sql("SELECT reward FROM experiences").fetchall() == [(0.0,), (0.0,)]


def test_an_id_that_comes_twice_in_one_append_with_other_content_is_told_so(store: Store) -> None:
    one, other = experiences(1, reward=1.0) + experiences(1, reward=0.0)
    with pytest.raises(ConflictError, match="comes twice among the new rows of `experiences`"):
        store.append("experiences", [one, other])
    assert store.count("experiences") == 0


def test_columns_without_a_value_are_not_written_and_read_as_null(store: Store) -> None:
    texts = experiences(4, response_text="carry the one")
    full = [replace(e, metadata={"at": 1}, reward=0.5) for e in experiences(8)[4:]]
    store.append("experiences", texts)
    store.append("experiences", full)
    store.append("experiences", experiences(12)[8:])
    dataset = store.dataset("experiences")
    written = [len(f.data_files()[0].fields) for f in dataset.get_fragments()]
    assert written[0] < written[1] < len(dataset.schema.names)

    def look(store: Store) -> list[Any]:
        before = store.scan("experiences").sort("experience_id").collect()
        query = "SELECT count(*), count(reward), count(metadata), sum(reward) FROM experiences"
        unread = "SELECT count(*) FROM experiences WHERE advantage IS NULL AND reward IS NULL"
        found = store.search("carry")
        return [before, store.sql(query).fetchall(), store.sql(unread).fetchall(), found.height]

    before = look(store)
    assert before[1:] == [[(12, 4, 4, 2.0)], [(8,)], 4]
    assert store.append("experiences", texts).duplicates == 4
    with pytest.raises(ConflictError):
        store.append("experiences", [replace(texts[0], reward=1.0)])
    assert {f.level for f in examine(store)} == {"ok"}
    store.maintain(grace=0)
    after = look(store)
    assert after[0].equals(before[0])
    assert after[1:] == before[1:]
    assert {f.level for f in examine(store)} == {"ok"}
