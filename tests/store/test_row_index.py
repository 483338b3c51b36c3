"""The light index that draws are made from, and the tail that feeds it."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.builders import experiences, task
from support.draws import a_store

from rlake.store import Experience, Store
from rlake.store.changes import ChangeFeed
from rlake.store.errors import QueryError
from rlake.store.replay import Fifo, Prioritized
from rlake.store.replay.filters import Conditions, hashed
from rlake.store.replay.row_index import Index
from rlake.store.replay.unit_pool import NO_VERSION
from rlake.store.side_columns import from_sql, parse_all

EXAMPLES = settings(max_examples=10)
ARRAYS = ("row_ids", "hashes", "allowed", "starts", "versions", "names", "drawable")

Cell = tuple[int | None, int, int]
"""Step, group and rollout of a row; a row is here once."""


def row(cell: Cell) -> Experience:
    """Make a row whose columns all follow from its place."""
    step, group, rollout = cell
    [e] = experiences(1)
    return replace(
        e,
        run_id="r",
        batch=step,
        group_id=f"g{group}",
        rollout_index=rollout,
        experience_id=f"{step}/{group}/{rollout}",
        policy_version=None if (group + rollout) % 5 == 4 else 3 * group + rollout,
        reward=None if rollout == 2 else float(rollout % 2),
        drop_reason="bad" if rollout == 3 else None,
    )


CELLS = st.tuples(
    st.none() | st.integers(0, 2),  # the step
    st.integers(0, 3),
    st.integers(0, 4),
)
COMMITS = st.lists(CELLS, unique=True, min_size=1, max_size=24).flatmap(
    lambda cells: st.lists(
        st.integers(1, len(cells)), min_size=len(cells), max_size=len(cells)
    ).map(
        lambda parts: [
            [c for c, p in zip(cells, parts, strict=True) if p == i] for i in dict.fromkeys(parts)
        ]
    )
)
"""Some rows in any order, cut into commits."""


def same(a: Index, b: Index) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.mark.parametrize("unit", ["rows", "groups"])
@EXAMPLES
@given(
    commits=COMMITS,
    compact=st.integers(0, 12),
    where=st.sampled_from([None, "reward > 0.5", "reward IS NULL OR batch = 1"]),
)
def test_an_index_that_followed_equals_a_fresh_one(
    empty_store: Path, unit: str, where: str | None, commits: list[list[Cell]], compact: int
) -> None:
    with a_store(empty_store) as store:
        following = Index(store, grouped=unit == "groups", where=where)
        for i, cells in enumerate(commits):
            store.append("experiences", [row(c) for c in cells])
            if i == compact:
                store.maintain()
            following.refresh()
        fresh = Index(store, grouped=unit == "groups", where=where)
        fresh.refresh()
        same(following, fresh)


@pytest.mark.parametrize("unit", ["rows", "groups"])
@EXAMPLES
@given(commits=COMMITS)
def test_an_index_says_what_the_rows_say(
    empty_store: Path, unit: str, commits: list[list[Cell]]
) -> None:
    made = [row(c) for cells in commits for c in cells]
    made.sort(
        key=lambda e: (
            e.batch or 0,
            str(e.group_id) if unit == "groups" else "",
            str(e.experience_id),
        )
    )
    with a_store(empty_store) as store:
        for cells in commits:
            store.append("experiences", [row(c) for c in cells])
        index = Index(store, grouped=unit == "groups", where="reward >= 0", run_id="r")
        index.refresh()
    called = [(e.batch or 0, e.group_id) if unit == "groups" else e.experience_id for e in made]
    units = [
        [e for e, n in zip(made, called, strict=True) if n == name]
        for name in dict.fromkeys(called)
    ]
    assert len(index) == len(units)
    assert np.diff(index.starts).tolist() == [len(u) for u in units], "groups are whole"
    oldest = [
        min(NO_VERSION if e.policy_version is None else e.policy_version for e in u) for u in units
    ]
    assert index.versions.tolist() == oldest
    may = [e.reward is not None and e.drop_reason is None for u in units for e in u]
    assert index.allowed.tolist() == may
    assert index.drawable.tolist() == [
        any(e.reward is not None and e.drop_reason is None for e in u) for u in units
    ]
    assert index.find([e.experience_id or "" for e in made]).tolist() == list(range(len(units)))


def indexed(store: Store, **options: Any) -> Index:
    index = Index(store, **{"grouped": False, **options})
    index.refresh()
    return index


def test_nothing_new_is_nothing_to_do(store: Store) -> None:
    index = Index(store, grouped=True)
    assert not index.refresh()
    store.append("experiences", experiences(4))
    assert index.refresh()
    assert not index.refresh()
    store.append("tasks", [task()])
    store.maintain()
    assert not index.refresh()


def test_only_the_run_that_was_asked_for_is_there(store: Store) -> None:
    for run in ("a", "it's"):
        made = experiences(4, run_id=run)
        named = [replace(e, experience_id=f"{run}/{e.experience_id}") for e in made]
        store.append("experiences", named[: 4 if run == "a" else 3])
    sizes = [len(indexed(store, run_id=run)) for run in ("a", "it's", "none", None)]
    assert sizes == [4, 3, 0, 7]


@pytest.mark.parametrize(
    ("where", "allowed"),
    [
        ("reward > 0.5", [True, False, False]),
        ("NOT reward > 0.5", [False, True, False]),
        ("NULL::BOOLEAN", [False, False, False]),
        ("true -- and a remark", [True, True, True]),
        ("reward IS NULL OR reward = 0", [False, True, True]),
        ("true) OR (false", [True, True, True]),
        ("experiences.rollout_index IN (1, 2)", [False, True, True]),
        ("task_id IN (SELECT task_id FROM tasks WHERE answer = '0')", [True, True, True]),
        ("task_id IN (SELECT task_id FROM tasks WHERE answer = '1')", [False, False, False]),
        (
            "reward = (SELECT max(e.reward) FROM experiences e "
            "WHERE e.group_id = experiences.group_id)",
            [True, False, False],
        ),
        ("run_id IS NULL", [True, True, True]),
        ("", [True, True, True]),
    ],
)  # fmt: skip
def test_where_is_true_false_or_null_which_is_false(
    store: Store, where: str, allowed: list[bool]
) -> None:
    store.append("tasks", [task(0)])
    store.append("experiences", experiences(3, reward=[1.0, 0.0, None]))
    assert indexed(store, where=where).allowed.tolist() == allowed


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("reward", "must be true or false, got double"),
        ("1", "must be true or false, got integer"),
        ("SELECT 1", "must be true or false, got integer"),
        ("rewrad > 1", "names a column `rewrad` that is not there; did you mean `reward`"),
        ("reward >", "`where` 'reward >'"),
        ("max(reward) > 1", "WHERE clause cannot contain aggregates"),
        ("row_number() OVER () > 1", "WHERE clause cannot contain window functions"),
        ("reward IN (SELECT reward FROM taskz)", "no table or view `taskz`; did you mean `tasks`"),
        ("reward IN (SELECT column0 FROM read_csv('/etc/passwd'))", "may only read the store"),
    ],
)
def test_a_wrong_where_is_refused_before_there_are_rows(
    store: Store, where: str, message: str
) -> None:
    with pytest.raises(QueryError) as wrong:
        Index(store, grouped=False, where=where)
    assert message in str(wrong.value)


def test_where_follows_the_tables_that_it_looks_into(store: Store) -> None:
    def judge(i: int, value: float) -> None:
        verdict = {"scorer": "s", "scorer_version": "1", "value": value}
        store.append("scores", [verdict | {"experience_id": f"g000/{i:02d}"}])

    where = "experience_id IN (SELECT experience_id FROM scores WHERE value > 0.5)"
    store.append("experiences", experiences(3))
    index = indexed(store, where=where)
    assert index.allowed.tolist() == [False, False, False]
    judge(1, 1.0)
    assert index.refresh()
    assert index.allowed.tolist() == [False, True, False]
    judge(0, 0.0)
    store.append("experiences", experiences(4))
    index.refresh()
    assert index.allowed.tolist() == [False, True, False, False]
    assert not index.refresh()


def test_where_tells_of_each_row_itself_in_however_many_pieces_the_rows_come(store: Store) -> None:
    where = "experience_id IN (SELECT experience_id FROM scores WHERE value > 0.5)"
    conditions = Conditions(store, where=where, query=None, until=None)
    ids = [f"e{i}" for i in range(12)]
    verdict = {"scorer": "s", "scorer_version": "1"}
    store.append(
        "scores",
        [verdict | {"experience_id": e, "value": float(i % 3 == 1)} for i, e in enumerate(ids)],
    )
    conditions.follow()
    nulls = pa.nulls(1, pa.string())
    pieces = [pa.record_batch({"experience_id": [e], "drop_reason": nulls}) for e in ids]
    for _ in range(100):  # the order in which a join gives its rows is that of its threads
        told = conditions.allowed(pa.Table.from_batches(pieces))
        assert told.tolist() == [i % 3 == 1 for i in range(12)]


def test_where_compares_with_all_rows_not_only_with_new_ones(store: Store) -> None:
    where = "reward >= (SELECT max(reward) FROM experiences)"
    index = Index(store, grouped=False, where=where)
    made = experiences(4, reward=[0.2, 0.1, 0.4, 0.3])
    for e in made:
        store.append("experiences", [e])
        index.refresh()
    assert index.allowed.tolist() == [False, False, True, False]


@EXAMPLES
@example(["append", "append", "read", "compact", "append", "read"])
@example(["append", "read", "append", "append", "compact", "append", "read", "compact", "read"])
@given(st.lists(st.sampled_from(["append", "compact", "read"]), min_size=1, max_size=14))
def test_a_tail_reads_each_row_once(empty_store: Path, actions: list[str]) -> None:
    with a_store(empty_store) as store:
        rows = experiences(2 * len(actions))
        made = iter([replace(e, run_id="r" if e.rollout_index < 3 else "s") for e in rows])
        tail = ChangeFeed(["experience_id"], run_id="r")
        read: list[str] = []
        expected: list[str] = []
        waiting: list[str] = []
        for action in [*actions, "read"]:
            dataset = store.dataset("experiences")
            if action == "append":
                new = [next(made), next(made)]
                store.append("experiences", new)
                waiting += [str(e.experience_id) for e in new if e.rollout_index < 3]
            elif action == "compact":
                store.maintain()
            elif action == "read":
                read += tail.read(dataset)["experience_id"].to_pylist()
                expected, waiting = expected + waiting, []
                assert not tail.moved(dataset)
                assert tail.read(dataset).num_rows == 0
            assert read == expected, "all that came, in order"


@pytest.mark.parametrize("unit", ["rows", "groups"])
@pytest.mark.parametrize("where", ["reward >= 1", "reward >= 1 OR batch = 1 AND reward IS NULL"])
@EXAMPLES
@given(data=st.data())
def test_conditions_follow_the_side_columns_that_replace_stored_ones(
    empty_store: Path, unit: str, where: str, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    made = experiences(24, reward=1.0)
    options: dict[str, Any] = {
        "grouped": unit == "groups",
        "where": where,
        "sides": parse_all(["reward=score:strict"]),
        "strategy": data.draw(st.sampled_from([Fifo(), Prioritized("1 + reward")])),
    }
    with a_store(empty_store) as store:
        following = Index(store, **options)
        for version in range(data.draw(st.integers(2, 4), label="commits")):
            some = rng.choice(24, rng.integers(1, 12), replace=False)
            if data.draw(st.booleans(), label="rows come"):
                store.append("experiences", [made[i] for i in some])
            store.append("scores", [
                {
                    "experience_id": made[i].experience_id,
                    "scorer": data.draw(st.sampled_from(["strict", "other"])),
                    "scorer_version": str(version),
                    "value": float(rng.integers(0, 3)),
                    "created_at": datetime(2026, 1, 1 + version, tzinfo=UTC),
                }
                for i in rng.choice(24, 6, replace=False)
            ])  # fmt: skip
            following.refresh()
        fresh = Index(store, **options)
        fresh.refresh()
        same(following, fresh)
        seen = from_sql(options["sides"])
        chosen = f"SELECT experience_id FROM {seen} AS experiences WHERE {where}"
        ids = {i for (i,) in store.sql(chosen).fetchall()}
        allowed = set(following.hashes[following.allowed].tolist())
        assert allowed == set(hashed(pl.Series(sorted(ids), dtype=pl.String)).tolist())
        if following.weighing and fresh.weighing:
            np.testing.assert_array_equal(
                following.weighing.masses.values, fresh.weighing.masses.values
            )
