"""Retention: what a rule names is forgotten, and listed; what a run may need is not."""

import pytest
from support.builders import experiences
from support.table_rows import event

from rlake.store import Store
from rlake.store.errors import ConfigError, NotFoundError, QueryError
from rlake.store.maintenance import retention
from rlake.store.maintenance.report import Forgotten
from rlake.store.store import Store as _Store


def left(store: Store, table: str = "experiences") -> list[str]:
    return sorted(store.scan(table).select("experience_id").collect()["experience_id"])


def listed(store: Store) -> list[tuple[str, str, str]]:
    query = "SELECT experience_id, operator, reason FROM drops ORDER BY 1"
    return store.sql(query).fetchall()


def test_rows_that_a_rule_names_are_deleted_and_listed(store: Store) -> None:
    store.append("experiences", experiences(4, reward=(1.0, 0.0)))
    store.snapshot("before")
    retention.add(store, "failures", table="experiences", where="reward < 1", note="too many")
    assert store.maintain().forgotten == (Forgotten("failures", "experiences", 2, 0),)
    assert left(store) == ["g000/00", "g000/02"]
    why = "failures: experiences where reward < 1"
    assert listed(store) == [("g000/01", "retention", why), ("g000/03", "retention", why)]
    assert left(store.at("before")) == ["g000/00", "g000/01", "g000/02", "g000/03"]
    assert store.maintain().forgotten == (Forgotten("failures", "experiences", 0, 0),)


def test_a_dry_run_only_counts(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    retention.add(store, "all", table="experiences", where="true")
    assert store.maintain(dry_run=True).forgotten == (Forgotten("all", "experiences", 4, 0),)
    assert (len(left(store)), store.count("drops")) == (4, 0)


def test_the_loops_own_maintenance_applies_no_rule(store: Store) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    retention.add(store, "all", table="experiences", where="true")
    assert store.maintain(only_due=True).forgotten == ()
    assert len(left(store)) == 4


@pytest.mark.parametrize(("status", "num_left"), [("running", 4), ("failed", 4), ("done", 0)])
def test_rows_of_unfinished_runs_stay(store: Store, status: str, num_left: int) -> None:
    store.append("experiences", experiences(4, run_id="r"))
    store.append("embeddings", [
        {"experience_id": i, "embedder": "e", "vector": [1.0]} for i in left(store)
    ])  # fmt: skip
    store.append("job_events", [event(status)])
    for table in ("embeddings", "experiences"):
        retention.add(store, table, table=table, where="true")
    done = {f.table: (f.rows, f.kept) for f in store.maintain().forgotten}
    assert done == dict.fromkeys(("embeddings", "experiences"), (4 - num_left, num_left))
    assert len(left(store)) == len(left(store, "embeddings")) == num_left


def test_a_run_of_which_nothing_came_for_long_counts_as_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append("experiences", experiences(4, run_id="r"))
    store.append("job_events", [event()])
    retention.add(store, "all", table="experiences", where="true")
    soon = retention._UNFINISHED.replace("INTERVAL 30 DAY", "INTERVAL 0 DAY")  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(retention, "_UNFINISHED", soon)
    assert store.maintain().forgotten == (Forgotten("all", "experiences", 4, 0),)


def test_a_kill_between_listing_and_deleting_lists_nothing_twice(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append("experiences", experiences(4, reward=0.0))
    retention.add(store, "all", table="experiences", where="reward < 1")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(retention, "locked", killed)
        with pytest.raises(KeyboardInterrupt):
            store.maintain()
    assert (len(left(store)), store.count("drops")) == (4, 4)
    store.append("experiences", experiences(5, reward=0.0)[4:])
    assert store.maintain().forgotten == (Forgotten("all", "experiences", 5, 0),)
    assert (len(left(store)), store.count("drops")) == (0, 5)


def test_a_forgotten_row_may_come_again(store: Store) -> None:
    rows = experiences(4, reward=0.0)
    store.append("experiences", rows)
    retention.add(store, "all", table="experiences", where="reward < 1")
    other = _Store(store.uri)
    assert other.append("experiences", rows).duplicates == 4
    store.maintain()
    retention.drop(store, "all")
    assert other.append("experiences", rows).rows == 4
    assert store.maintain().forgotten == ()
    assert len(left(store)) == 4


def test_a_condition_may_look_into_other_tables_and_know_the_time(store: Store) -> None:
    store.append("experiences", experiences(4))
    verdict = {"scorer": "strict", "scorer_version": "1", "value": 0.0}
    store.append("scores", [verdict | {"experience_id": "g000/02"}])
    retention.add(
        store,
        "bad",
        table="experiences",
        where="experience_id IN (SELECT experience_id FROM scores WHERE value < 1)",
    )
    retention.add(store, "ancient", table="scores", where="created_at < now() - INTERVAL 90 DAY")
    done = {f.rule: f.rows for f in store.maintain().forgotten}
    assert done == {"bad": 1, "ancient": 0}
    assert left(store) == ["g000/00", "g000/01", "g000/03"]


def test_several_rows_of_one_experience_go_by_their_own_columns(store: Store) -> None:
    store.append("experiences", experiences(1))
    store.append("scores", [
        {"experience_id": "g000/00", "scorer": "strict", "scorer_version": v, "value": 1.0}
        for v in ("1", "2", "3")
    ])  # fmt: skip
    retention.add(store, "old", table="scores", where="scorer_version < '3'")
    assert store.maintain().forgotten == (Forgotten("old", "scores", 2, 0),)
    assert store.sql("SELECT scorer_version FROM scores").fetchall() == [("3",)]


def test_rules_are_listed_and_taken_back(store: Store) -> None:
    retention.add(store, "a", table="experiences", where="reward < 1")
    retention.add(store, "b", table="scores", where="value < 1")
    with pytest.raises(ConfigError, match="there is a rule `a` already"):
        retention.add(store, "a", table="experiences", where="true")
    assert list(retention.current(store)) == ["a", "b"]
    retention.drop(store, "a")
    assert list(retention.current(store)) == ["b"]
    with pytest.raises(NotFoundError, match="no retention rule is called `a`; known are `b`"):
        retention.drop(store, "a")
    retention.add(store, "a", table="experiences", where="reward < 0")
    assert retention.current(store)["a"].where == "reward < 0"


@pytest.mark.parametrize(
    ("table", "where", "error", "words"),
    [
        ("experiences", "rewrad < 1", QueryError, "did you mean `reward`"),
        ("experiences", "reward <", QueryError, "does not parse"),
        ("experiences", "true); SELECT (1", QueryError, "must be one expression|does not parse"),
        ("experiences", "reward + 1", QueryError, "must be true or false, got double"),
        ("experiences", "count(*) > 1", QueryError, "WHERE clause cannot contain aggregates"),
        ("experiences", "row_number() OVER () > 1", QueryError, "WHERE clause cannot contain"),
        ("draws", "true", ConfigError, "rows of `draws` stay: .* rules are for `experiences`"),
        ("job_events", "true", ConfigError, "the store's own record"),
        ("metrics", "true", ConfigError, "`drops` could not list them"),
        ("experience", "true", NotFoundError, "did you mean `experiences`"),
    ],
)
def test_a_rule_that_cannot_be_applied_is_refused_when_it_is_made(
    store: Store, table: str, where: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        retention.add(store, "rule", table=table, where=where)
    assert store.count("retention") == 0
