"""The views and macros, on rows made by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import isclose
from typing import Any

import pytest
from support.builders import experiences
from support.table_rows import draw, event
from support.table_rows import policy as policy_row

from rlake.store import Experience, Store
from rlake.store.records import now


def run_row(attempt: int, start_step: int, **rest: Any) -> dict[str, Any]:
    return event(attempt=attempt, start_step=start_step) | rest


def draw_row(attempt: int, step: int, experience_id: str, **rest: Any) -> dict[str, Any]:
    return draw(experience_id, step, attempt=attempt, **rest)


def singles(n: int, *, version: int | Sequence[int | None] | None = 0) -> list[Experience]:
    """Make n groups of one row, e0, e1 ..., of run `r`."""
    versions = version if isinstance(version, Sequence) else [version] * n
    return [
        replace(e, experience_id=f"e{i}", run_id="r", policy_version=v, reward=float(i))
        for i, (e, v) in enumerate(zip(experiences(n, group_size=1), versions, strict=True))
    ]


def one(store: Store, query: str) -> tuple[Any, ...]:
    [row] = store.sql(query).fetchall()
    return row


@pytest.mark.parametrize("n", range(7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(store: Store, n: int) -> None:
    for c in range(n + 1):
        for k in range(1, 8):
            answers = [True] * c + [False] * (n - c)
            subsets = list(combinations(answers, k))
            [(got,)] = store.sql(f"SELECT pass_at_k({n}, {c}, {k})").fetchall()
            if not subsets:
                assert got is None, f"{k} of {n} cannot be drawn"
            else:
                expected = sum(any(s) for s in subsets) / len(subsets)
                assert isclose(got, expected, abs_tol=1e-12), (n, c, k)


def test_pass_at_k_of_many_tries_does_not_overflow(store: Store) -> None:
    [(none, few, nearly_all)] = store.sql(
        "SELECT pass_at_k(100000, 0, 100), pass_at_k(100000, 1000, 1), pass_at_k(100000, 5000, 512)"
    ).fetchall()
    assert none == 0.0
    assert isclose(few, 0.01)
    assert 0.999 < nearly_all < 1.0


def test_groups_leave_null_rewards_out_and_count_them(store: Store) -> None:
    store.append("experiences", experiences(4, reward=[1.0, 0.0, None, 0.5]))
    group = one(
        store,
        "SELECT num_rollouts, num_scored, reward_mean, round(reward_std, 6), reward_min, "
        "reward_max, num_passed, pass_rate FROM groups",
    )
    assert group == (4, 3, 0.5, 0.5, 0.0, 1.0, 1, 1 / 3)


def test_a_group_without_rewards_has_no_statistics(store: Store) -> None:
    store.append("experiences", experiences(4, reward=None))
    group = one(
        store, "SELECT num_rollouts, num_scored, num_passed, reward_mean, pass_rate FROM groups"
    )
    assert group == (4, 0, 0, None, None)


def test_null_is_not_zero_in_a_group(store: Store) -> None:
    made = [
        *experiences(4, reward=[1.0, None, None, None]),
        *experiences(8, reward=[1.0, 0.0, 0.0, 0.0])[4:],
    ]
    store.append("experiences", made)
    found = store.sql("SELECT reward_mean FROM groups ORDER BY group_id").fetchall()
    assert found == [(1.0,), (0.25,)]


def test_groups_of_two_runs_are_two(store: Store) -> None:
    [a, b] = experiences(2, reward=[1.0, 0.0])
    store.append("experiences", [replace(a, run_id="a"), replace(b, run_id="b")])
    found = store.sql("SELECT run_id, num_rollouts, reward_mean FROM groups ORDER BY 1").fetchall()
    assert found == [("a", 1, 1.0), ("b", 1, 0.0)]


def resumed(store: Store) -> None:
    """Store a run of three attempts: 1 took steps 1-5, 2 resumed at 4, 3 resumed at 3."""
    store.append("job_events", [run_row(1, 1), run_row(2, 4), run_row(3, 3)])
    store.append("job_events", [run_row(1, 1, job="explore"), run_row(2, 9, job="explore")])
    taken = {1: range(1, 6), 2: range(4, 7), 3: range(3, 5)}
    for attempt, steps in taken.items():
        draws = [draw_row(attempt, s, f"e{s}", lag=attempt) for s in steps]
        store.append("draws", draws)
        store.append("policies", [policy_row(attempt, s) for s in steps])
        names = {"run_id": "r", "attempt": attempt, "name": "train/loss"}
        store.append("metrics", [names | {"job": "train", "step": s, "value": 1.0} for s in steps])
        store.append("metrics", [names | {"job": "explore", "step": 9, "value": 1.0}])


def test_what_a_later_attempt_did_again_does_not_count(store: Store) -> None:
    resumed(store)
    current = [(1, 1), (1, 2), (3, 3), (3, 4)]
    ordered = "ORDER BY step, attempt"
    for view in ("draws_current", "policies_current", "metrics_current"):
        where = "WHERE job = 'train'" if view == "metrics_current" else ""
        found = store.sql(f"SELECT attempt, step FROM {view} {where} {ordered}").fetchall()
        assert found == current, view


def test_metrics_of_other_jobs_are_not_superseded(store: Store) -> None:
    resumed(store)
    found = store.sql("SELECT attempt FROM metrics_current WHERE job = 'explore' ORDER BY 1")
    assert found.fetchall() == [(1,), (2,), (3,)]


def test_an_attempt_that_only_started_supersedes(store: Store) -> None:
    store.append("job_events", [run_row(1, 1)])
    store.append("draws", [draw_row(1, s, f"e{s}") for s in (1, 2, 3)])
    store.append("job_events", [run_row(2, 2)])
    assert store.sql("SELECT step FROM draws_current").fetchall() == [(1,)]


def test_another_run_supersedes_nothing(store: Store) -> None:
    store.append(
        "job_events", [run_row(1, 1), run_row(1, 1, run_id="s"), run_row(2, 1, run_id="s")]
    )
    store.append("draws", [draw_row(1, 1, "e1"), draw_row(1, 1, "e1", run_id="s")])
    assert store.sql("SELECT run_id FROM draws_current").fetchall() == [("r",)]


def test_runs_current_says_where_each_job_stands(store: Store) -> None:
    store.append("job_events", [run_row(1, 1), run_row(1, 1, job="explore")])
    store.append("job_events", [run_row(1, 1, status="failed", error="killed")])
    store.append("job_events", [run_row(2, 3)])
    store.append("job_events", [run_row(2, 3, status="done", ended_at=now())])
    found = store.sql("SELECT job, attempt, status FROM runs ORDER BY job").fetchall()
    assert found == [("explore", 1, "running"), ("train", 2, "done")]


def test_steps_tell_what_each_was_trained_on(store: Store) -> None:
    made = [replace(e, token_ids=[1] * (i + 1)) for i, e in enumerate(singles(6, version=3))]
    store.append("experiences", made)
    resumed(store)
    store.append("draws", [draw_row(3, 4, "e5", position=1, lag=9)])
    found = store.sql(
        "SELECT step, attempt, num_rows, num_groups, lag_mean, lag_max, reward_mean, "
        "policy_version_min, num_tokens FROM steps ORDER BY step"
    ).fetchall()
    assert found == [
        (1, 1, 1, 1, 1.0, 1, 1.0, 3, 2),
        (2, 1, 1, 1, 1.0, 1, 2.0, 3, 3),
        (3, 3, 1, 1, 3.0, 3, 3.0, 3, 4),
        (4, 3, 2, 2, 6.0, 9, 4.5, 3, 11),
    ]


def backlog(store: Store) -> tuple[Any, ...]:
    return one(
        store, "SELECT policy_version, num_rows, drawn, undrawn, dropped, fresh, stale FROM backlog"
    )


def test_the_backlog_counts_what_waits(store: Store) -> None:
    made = singles(6, version=[0, 1, 2, 3, None, 3])
    store.append("experiences", [*made[:5], replace(made[5], drop_reason="bad")])
    store.append("job_events", [run_row(1, 1, config='{"schedule": {"max_lag": 1}}')])
    store.append("policies", [policy_row(1, v) for v in range(4)])
    store.append("draws", [draw_row(1, 1, "e0")])
    assert backlog(store) == (3, 6, 1, 5, 1, 3, 1), "rows that no policy wrote are never stale"


def test_what_a_superseded_attempt_drew_waits_again(store: Store) -> None:
    store.append("experiences", singles(3))
    store.append("job_events", [run_row(1, 1)])
    store.append("draws", [draw_row(1, s, f"e{s - 1}") for s in (1, 2, 3)])
    assert backlog(store)[2:4] == (3, 0)
    store.append("job_events", [run_row(2, 2)])
    assert backlog(store)[2:4] == (1, 2)


def test_without_a_limit_nothing_is_stale(store: Store) -> None:
    store.append("experiences", singles(3))
    store.append("job_events", [run_row(1, 1)])
    store.append("policies", [policy_row(1, 1000)])
    assert backlog(store) == (1000, 3, 0, 3, 0, 3, 0)


def test_what_another_run_drew_still_waits(store: Store) -> None:
    store.append("experiences", singles(3))
    store.append("job_events", [run_row(1, 1)])
    store.append("draws", [draw_row(1, s, f"e{s}", run_id="offline") for s in (0, 1)])
    assert backlog(store)[2:4] == (0, 3)


def test_the_backlog_is_of_runs_that_have_a_trainer(store: Store) -> None:
    tries = [
        replace(e, experience_id=f"{run}/{e.experience_id}", run_id=run)
        for run in ("r", "r:eval-0", "explored")
        for e in singles(2)
    ]
    store.append("experiences", tries)
    config = '{"schedule": {"max_lag": 1}}'
    store.append("job_events", [run_row(1, 1, config=config), run_row(1, 1, job="explore")])
    store.append("job_events", [run_row(1, 1, run_id="r:eval-0", job="evaluate")])
    store.append("job_events", [run_row(1, 1, run_id="explored", job="explore")])
    store.append("policies", [policy_row(1, 9)])
    found = store.sql("SELECT run_id, num_rows, fresh, stale FROM backlog").fetchall()
    assert found == [("r", 2, 0, 2)], "and the limit is the trainer's"


def test_outcomes_say_what_became_of_each_row(store: Store) -> None:
    made = singles(9, version=[3, 3, 3, 3, 3, 0, 3, 3, 0])
    changed: dict[int, dict[str, Any]] = {
        1: {"drop_reason": "max_length: too long"},
        4: {"reward": None},
        7: {"batch": 2},
        8: {"purpose": "eval"},
    }
    rows = [replace(row, **({"batch": 1} | changed.get(i, {}))) for i, row in enumerate(made)]
    last = replace(made[0], experience_id="e9", batch=2)
    store.append("experiences", [*rows, last])
    config = '{"schedule": {"max_lag": null, "max_ahead": 1, "publish_every": 1}}'
    store.append("job_events", [run_row(1, 1, config=config)])
    drawn = [
        draw_row(1, 4, "e0", lag=2),
        draw_row(1, 5, "e0", lag=4),
        draw_row(1, 5, "e9", position=1),
    ]
    left = [draw_row(1, 4, e, weight=0.0, position=p) for p, e in ((1, "e2"), (2, "e3"))]
    store.append("draws", [*drawn, *left])
    why = {"experience_id": "e2", "operator": "keep", "reason": "no"}
    store.append("drops", [{"lineage_id": "r/001/000004"} | why, {"lineage_id": "other"} | why])
    found = store.sql(
        "SELECT experience_id, outcome, num_draws, num_trained, lag FROM outcomes ORDER BY 1"
    ).fetchall()
    assert found == [
        ("e0", "trained", 2, 2, 3.0),
        ("e1", "dropped by max_length", 0, 0, None),
        ("e2", "filtered by keep", 1, 0, None),
        ("e3", "drawn, not trainable", 1, 0, None),
        ("e4", "without a reward", 0, 0, None),
        ("e5", "stale", 0, 0, None),
        ("e6", "not chosen", 0, 0, None),
        ("e7", "waiting", 0, 0, None),
        ("e9", "trained", 1, 1, 0.0),
    ]


def test_the_effective_sample_size_of_equal_weights_is_their_number(store: Store) -> None:
    query = "SELECT effective_sample_size(w) FROM (VALUES {}) t(w)"
    assert one(store, query.format("(2.0), (2.0), (2.0)")) == (3.0,)
    assert one(store, query.format("(3.0), (1.0), (0.0)")) == (1.6,)
    assert one(store, query.format("(0.0), (0.0)")) == (0.0,)
