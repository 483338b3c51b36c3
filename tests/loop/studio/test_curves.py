"""Curves that grow come to what is read from the tables as a whole."""

import pytest
from support.table_rows import event

from rlake.loop.report.curves import POINTS, curves_sql
from rlake.loop.studio.curves import GrowingCurves, Points, of_run
from rlake.store import Store
from rlake.store.errors import StoreError

NAMES = ("train/loss", "train/kl", "train/tokens_per_row")


def rows(steps: range, attempt: int = 1, **values: float) -> list[dict[str, object]]:
    one = {"run_id": "r", "attempt": attempt, "job": "train"}
    return [
        one | {"step": step, "name": f"train/{name}", "value": value + step}
        for step in steps
        for name, value in values.items()
    ]


def whole(store: Store) -> Points:
    return of_run(store.sql(curves_sql(["r"], NAMES)).fetchall(), "r", NAMES)


def test_new_rows_make_the_points_that_reading_all_rows_makes(store: Store) -> None:
    store.append("job_events", [event("running", run_id="r", config="{}", start_step=1)])
    store.append("metrics", rows(range(1, 4), loss=0.5, tokens=10.0, rows=1.0))
    grown = GrowingCurves(store, "r", NAMES)
    assert grown.read() == (True, whole(store))
    assert grown.read() == (False, {}), "nothing was added"
    store.append("metrics", rows(range(4, 6), loss=0.5, kl=0.0, tokens=3.0))
    assert grown.read() == (
        False,
        {"train/loss": [(4, 4.5), (5, 5.5)], "train/kl": [(4, 4.0), (5, 5.0)]},
    )
    other = [row | {"run_id": "other"} for row in rows(range(6, 7), loss=9.0)]
    store.append("metrics", [*other, *rows(range(4, 6), rows=0.0)])
    assert grown.read() == (False, {"train/tokens_per_row": [(4, 7 / 4), (5, 8 / 5)]})
    assert grown.points == whole(store)


def test_all_points_are_read_again_where_old_ones_are_not_true_anymore(store: Store) -> None:
    first = event("running", run_id="r", config="{}", start_step=1)
    store.append("job_events", [first])
    store.append("metrics", rows(range(1, 9), loss=0.5))
    grown = GrowingCurves(store, "r", NAMES)
    grown.read()
    store.append("job_events", [first | {"attempt": 2, "start_step": 4}])
    assert grown.read() == (True, whole(store)), "steps from the fourth on are superseded"
    assert max(grown.points["train/loss"]) == (3, 3.5)
    store.append("metrics", rows(range(4, 6), attempt=2, loss=0.0))
    assert grown.read() == (False, {"train/loss": [(4, 4.0), (5, 5.0)]})
    explored = [row | {"job": "explore"} for row in rows(range(5, 6), attempt=2, loss=1.0)]
    store.append("metrics", explored)
    assert grown.read() == (True, whole(store)), "a step with two values has their mean"
    assert grown.points["train/loss"][-1] == (5, 5.5)
    store.append("metrics", rows(range(6, 2 * POINTS + 6), attempt=2, loss=1.0))
    assert grown.read() == (True, whole(store))
    assert len(grown.points["train/loss"]) <= POINTS


def test_a_ratio_whose_parts_come_apart_is_whole_whatever_was_read_between(store: Store) -> None:
    grown = GrowingCurves(store, "r", NAMES)
    store.append("metrics", rows(range(1, 3), tokens=10.0))
    assert grown.read() == (True, {})
    store.append("metrics", rows(range(1, 3), rows=1.0))
    assert grown.read() == (False, {"train/tokens_per_row": [(1, 5.5), (2, 4.0)]})
    assert grown.points == whole(store)


def test_what_was_stored_while_all_points_were_read_leaves_with_a_restore(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append("metrics", rows(range(1, 4), loss=0.5))
    store.snapshot("before")
    grown, before, sql = GrowingCurves(store, "r", NAMES), whole(store), store.sql

    def late(query: str) -> object:
        monkeypatch.undo()
        store.append("metrics", rows(range(4, 5), loss=0.5))
        return sql(query)

    monkeypatch.setattr(store, "sql", late)
    grown.read()
    assert grown.points["train/loss"][-1] == (4, 4.5)
    store.restore("before")
    assert grown.read() == (True, before)
    assert grown.read() == (False, {})


@pytest.mark.parametrize("why", ["resumed", "two values"])
def test_a_read_that_failed_is_made_up_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def fail(query: str) -> None:
        raise StoreError("is restored")

    first = event("running", run_id="r", config="{}", start_step=1)
    store.append("job_events", [first])
    store.append("metrics", rows(range(1, 3), loss=0.5))
    grown = GrowingCurves(store, "r", NAMES)
    grown.read()
    if why == "resumed":
        store.append("job_events", [first | {"attempt": 2, "start_step": 2}])
    else:  # another value of a step that is known, after one that is not
        both = [row | {"job": "explore"} for row in rows(range(2, 3), loss=4.5)]
        store.append("metrics", [*rows(range(3, 4), loss=0.5), *both])
    with monkeypatch.context() as during:
        during.setattr(store, "sql", fail)
        with pytest.raises(StoreError, match="restored"):
            grown.read()
    assert grown.read() == (True, whole(store))
    assert grown.read() == (False, {})


def test_a_restored_store_has_the_curves_of_then(store: Store) -> None:
    store.append("metrics", rows(range(1, 3), loss=0.5))
    store.snapshot("then")
    grown = GrowingCurves(store, "r", NAMES)
    grown.read()
    store.append("metrics", rows(range(3, 9), loss=0.5))
    grown.read()
    store.restore("then")
    assert grown.read() == (True, {"train/loss": [(1, 1.5), (2, 2.5)]})
