"""What the page Tasks reads: pass rates over versions, and the tasks that it lists."""

from support.builders import experiences, task

from rlake.loop.studio.pages.tasks import ORDERS, over_versions_sql, tasks_sql
from rlake.store import Store

FORGOTTEN, SOLVED = ORDERS["Forgotten"], ORDERS["Solved lately"]


def add(store: Store, run_id: str, version: int, reward: float) -> None:
    """Store a group of the one task, sampled by a version of a run's policy."""
    name = f"{run_id}/{version}"
    columns = {"run_id": run_id, "policy_version": version, "batch": version, "group_id": name}
    made = experiences(4, reward=reward, source="explorer", **columns)
    rows = [one.row() | {"experience_id": f"{name}/{i}"} for i, one in enumerate(made)]
    store.append("experiences", rows)


def listed(store: Store, run_id: str, order: tuple[str, str]) -> list[tuple[str, str]]:
    return [row[:2] for row in store.sql(tasks_sql(run_id, "", *order)).fetchall()]


def test_versions_of_two_runs_are_no_sequence(store: Store) -> None:
    """A run that knows nothing has more versions than one that began from it and learns."""
    store.append("tasks", [task()])
    for version in (0, 400):
        add(store, "first", version, 0.0)
    for version in (0, 80):
        add(store, "second", version, float(version > 0))
    name = task().task_id
    assert listed(store, "", FORGOTTEN) == []
    assert listed(store, "", SOLVED) == [(name, "second")]
    add(store, "second", 81, 0.0)
    assert listed(store, "", FORGOTTEN) == listed(store, "second", FORGOTTEN) == [(name, "second")]
    curves = store.sql(over_versions_sql("", "")).fetchall()
    assert [(run, version, rate) for run, *_, version, rate in curves] == [
        ("first", 0, 0.0),
        ("first", 400, 0.0),
        ("second", 0, 0.0),
        ("second", 80, 1.0),
        ("second", 81, 0.0),
    ]


def test_evaluations_of_a_run_are_its_own_and_a_curve_apart(store: Store) -> None:
    store.append("tasks", [task()])
    add(store, "a:eval-001", 0, 0.0)
    add(store, "a:eval-002", 9, 1.0)
    add(store, "ab", 3, 0.5)
    assert listed(store, "a", SOLVED) == listed(store, "", SOLVED) == [(task().task_id, "a")]
    curves = store.sql(over_versions_sql("a", "")).fetchall()
    assert [row[:2] + row[3:] for row in curves] == [("a", True, 0, 0.0), ("a", True, 9, 1.0)]
