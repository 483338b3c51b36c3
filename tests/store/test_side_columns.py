"""Side columns: later values are joined to stored rows by name, and the newest one counts."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from support.builders import experiences
from support.table_rows import event

from rlake.store import Store, side_columns
from rlake.store.errors import NotFoundError, QueryError

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def score(i: int, value: float | None, *, scorer: str = "strict", version: str = "1") -> Any:
    return {
        "experience_id": f"g{i // 4:03d}/{i % 4:02d}",
        "scorer": scorer,
        "scorer_version": version,
        "value": value,
    }


def derived(i: int, value: float | None, *, version: str, **rest: Any) -> dict[str, Any]:
    row = {"experience_id": f"g000/{i:02d}", "name": "quality", "version": version, "value": value}
    return row | rest


def feedback(i: int, annotator: str, label: str | None, number: float | None) -> dict[str, Any]:
    return {
        "feedback_id": f"{annotator}-{i}-{label}-{number}",
        "experience_id": f"g000/{i:02d}",
        "annotator": annotator,
        "label": label,
        "score": number,
    }


@pytest.fixture
def judged(store: Store) -> Store:
    """Four rows with rewards 1, 0, 0, 1, and what was said of them later."""
    store.append("experiences", experiences(4, reward=[1.0, 0.0, 0.0, 1.0]))
    store.append("scores", [score(i, 0.5, version="1") for i in range(4)])
    store.append("scores", [score(0, None, version="2"), score(1, 0.25, version="2")])
    store.append("scores", [score(3, 0.75, scorer="my.rewards:lenient")])
    store.append("feedback", [feedback(0, "alice", "good", 1.0), feedback(1, "alice", "bad", 0.0)])
    store.append("feedback", [feedback(0, "bob", "bad", None)])
    store.append("job_events", [event()])
    store.append("experience_values", [derived(0, 1.0, version="a"), derived(1, 2.0, version="a")])
    ours = {"run_id": "r", "attempt": 1}
    store.append("experience_values", [derived(0, 10.0, version="r/1/1", step=1, **ours)])
    store.append("experience_values", [derived(0, 20.0, version="r/1/5", step=5, **ours)])
    store.append("job_events", [event(attempt=2, start_step=3)])
    store.append("experience_values", [derived(2, None, version="t", text="of clips")])
    return store


CASES = {
    "score:strict@1": [0.5, 0.5, 0.5, 0.5],
    "score:strict@2": [None, 0.25, None, None],
    "score:strict": [None, 0.25, 0.5, 0.5],
    "score:my.rewards:lenient": [None, None, None, 0.75],
    "reward=score:strict": [None, 0.25, 0.5, 0.5],
    "feedback:label": ["bad", "bad", None, None],
    "feedback:label@alice": ["good", "bad", None, None],
    "feedback:score": [1.0, 0.0, None, None],
    "derived:quality": [10.0, 2.0, None, None],
    "derived:quality@a": [1.0, 2.0, None, None],
    "priority=derived:quality": [10.0, 2.0, None, None],
    "derived:quality.text": [None, None, "of clips", None],
}
"""What each spec gives for the four rows: of versions 1 and 2 the newest counts, also when NULL;
bob's label has no number; step 5 of attempt 1 was done again by attempt 2."""


@pytest.mark.parametrize("spec", CASES)
def test_polars_sql_and_attach_give_the_same_values(judged: Store, spec: str) -> None:
    column = side_columns.parse(spec)
    expected = CASES[spec]
    scanned = judged.scan("experiences", with_columns=[spec]).sort("experience_id").collect()
    assert scanned[column.alias].to_list() == expected
    rows = judged.sql(
        f'SELECT "{column.alias}" FROM {side_columns.from_sql([column])} AS e '
        "ORDER BY experience_id"
    ).fetchall()
    assert [value for (value,) in rows] == expected
    some = judged.scan("experiences").select("reward", "experience_id").collect()
    backwards = some.sort("experience_id", descending=True)
    attached = side_columns.attach(judged, backwards, [column])
    assert attached["experience_id"].to_list() == backwards["experience_id"].to_list()
    assert attached[column.alias].to_list() == expected[::-1]


@pytest.mark.parametrize("spec", CASES)
def test_a_side_column_can_be_written_down_and_read_again(spec: str) -> None:
    assert side_columns.parse(str(side_columns.parse(spec))) == side_columns.parse(spec)


def test_a_replaced_column_stays_in_its_place_and_the_stored_one_as_it_was(judged: Store) -> None:
    names = judged.scan("experiences").collect_schema().names()
    replaced = judged.scan("experiences", with_columns=["reward=score:strict@1", "derived:quality"])
    assert replaced.collect_schema().names() == [*names, "quality"]
    kept = replaced.filter(pl.col("reward") > 0.25).select("experience_id").collect()
    assert kept.height == 4, "a filter sees the new reward"
    assert sum(judged.scan("experiences").collect()["reward"]) == 2.0


def test_side_columns_keep_every_row_and_the_order(judged: Store) -> None:
    plain = judged.scan("experiences").select("experience_id").collect()
    both = judged.scan("experiences", with_columns=["score:strict", "feedback:label"])
    assert both.select("experience_id").collect().equals(plain)


def test_filters_and_columns_are_pushed_down_through_side_columns(judged: Store) -> None:
    lazy = judged.scan("experiences", with_columns=["score:strict@2"])
    plan = lazy.filter(pl.col("group_id") == "g000").select("experience_id", "strict").explain()
    assert 'SELECTION: col("group_id") == "g000"' in plan
    assert f"PROJECT 2/{len(lazy.collect_schema()) - 1} COLUMNS" in plan


def test_an_attached_column_has_its_type_also_when_there_is_no_row(judged: Store) -> None:
    none = judged.scan("experiences").select("experience_id", "reward").collect().head(0)
    columns = side_columns.parse_all(["reward=score:strict", "feedback:label", "derived:quality"])
    attached = side_columns.attach(judged, none, columns)
    assert dict(attached.schema) == {
        "experience_id": pl.String, "reward": pl.Float64, "label": pl.String, "quality": pl.Float64
    }  # fmt: skip


def test_the_past_has_the_side_columns_that_it_had(judged: Store) -> None:
    judged.snapshot("before")
    judged.append("scores", [score(i, 9.0, version="3") for i in range(4)])
    before = judged.at("before").scan("experiences", with_columns=["score:strict"]).collect()
    after = judged.scan("experiences", with_columns=["score:strict"]).collect()
    assert sorted(before["strict"].drop_nulls()) == [0.25, 0.5, 0.5]
    assert set(after["strict"]) == {9.0}


def test_views_of_side_tables_hold_what_counts(judged: Store) -> None:
    def one(query: str) -> list[tuple[Any, ...]]:
        return judged.sql(query).fetchall()

    scores = one("SELECT scorer_version, count(*) FROM scores_current GROUP BY 1 ORDER BY 1")
    assert scores == [("1", 3), ("2", 2)]
    assert one("SELECT label FROM feedback_current ORDER BY 1") == [("bad",), ("bad",), ("good",)]
    kept = one("SELECT experience_id, value, version FROM experience_values_current ORDER BY 1")
    assert kept == [("g000/00", 10.0, "r/1/1"), ("g000/01", 2.0, "a"), ("g000/02", None, "t")]


def test_rows_of_one_moment_are_told_apart_by_their_version(store: Store) -> None:
    store.append("experiences", experiences(1))
    rows = [score(0, float(v), version=v) | {"created_at": LONG_AGO} for v in ("2", "3", "1")]
    store.append("scores", rows)
    assert store.scan("experiences", with_columns=["score:strict"]).collect()["strict"][0] == 3.0
    assert store.sql("SELECT value FROM scores_current").fetchall() == [(3.0,)]


def test_the_newest_row_is_the_last_one_appended_whatever_its_version(store: Store) -> None:
    store.append("experiences", experiences(1))
    for minutes, version in enumerate(("9", "10", "2")):
        at = LONG_AGO + timedelta(minutes=minutes)
        store.append("scores", [score(0, float(version), version=version) | {"created_at": at}])
    assert store.scan("experiences", with_columns=["score:strict"]).collect()["strict"][0] == 2.0


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("scor:x", "did you mean `score`"),
        ("strict", "names no side column; write `score:NAME@VERSION`"),
        ("score:", "names no side column"),
        ("=score:x", "names no side column"),
        ("feedback:lable", "did you mean `label`"),
        ("batch=score:x", "would hide the column `batch`"),
        ("Batch=score:x", "would hide the column `Batch`"),
        ("score:reward", "write `reward=score:reward`"),
        ("derived:batch", "would hide the column `batch`"),
        ("reward=feedback:label", "`reward` is a number"),
        ("score:a-b", "`NAME=...`"),
    ],
)
def test_a_wrong_side_column_is_refused_with_the_way_out(
    store: Store, spec: str, told: str
) -> None:
    with pytest.raises(QueryError, match=told):
        store.scan("experiences", with_columns=[spec])


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        (["score:strikt"], "no score by `strikt`; did you mean `strict`"),
        (["score:strict@3"], "of version `3`; known are `1`, `2`"),
        (["feedback:label@alise"], "no feedback by `alise`; did you mean `alice`"),
        (["derived:qualty"], "did you mean `quality`"),
        (["score:strict", "derived:quality@z"], "derived value by `quality` of version `z`"),
    ],
)
def test_a_side_column_of_which_nothing_is_stored_is_an_error(
    judged: Store, specs: Sequence[str], told: str
) -> None:
    with pytest.raises(NotFoundError, match=told):
        judged.scan("experiences", with_columns=specs)


def test_a_store_without_any_score_says_so(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no score is stored yet, and `strict` needs one"):
        store.scan("experiences", with_columns=["score:strict"])


def test_two_side_columns_need_two_names(judged: Store) -> None:
    with pytest.raises(QueryError, match="two side columns are called `strict`"):
        judged.scan("experiences", with_columns=["score:strict@1", "score:strict@2"])
    both = judged.scan("experiences", with_columns=["old=score:strict@1", "score:strict@2"])
    assert {"old", "strict"} <= set(both.collect_schema())


def test_side_columns_are_of_experiences(judged: Store) -> None:
    with pytest.raises(QueryError, match="side columns are of `experiences`"):
        judged.scan("draws", with_columns=["score:strict"])
