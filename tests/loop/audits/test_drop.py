"""`rlake audit drop`: what explains a change of the mean reward between two ranges of steps."""

import json
import math
from collections import defaultdict

import pytest
from support.histories import SEEDS, History, Row

from rlake.loop.audits import Drop, drop
from rlake.loop.audits.drop import parse_steps
from rlake.store import Store
from rlake.store.errors import JobError, QueryError

LATE, EARLY = (11, 20), (1, 10)


def with_a_drop(seed: int) -> History:
    """From step 11 on, the taskset `hard` is hardly ever solved."""
    history = History(seed, groups=32)

    def is_hard(row: Row) -> bool:
        return row["batch"] > 10 and history.taskset[row["task_id"]] == "hard"

    zero = [{"name": "correct", "value": 0.0}]
    history.change(lambda r: is_hard(r) and history.rng.random() < 0.9, reward=0.0, rewards=zero)
    return history


def check_drop(store: Store, seed: int) -> None:
    found = drop(with_a_drop(seed).write(store), "r", LATE, EARLY)
    assert found.findings[0].startswith("the mean reward fell by")
    told = [f.split(" explains")[0] for f in found.findings[1:]]
    assert told[:2] == ["part correct", "taskset hard"]
    assert not {t for t in told if t.startswith(("taskset easy", "source", "length", "finish"))}
    (hard,) = [r for r in found.splits if (r["dimension"], r["bin"]) == ("taskset", "hard")]
    assert hard["p"] < 1e-3
    assert abs(hard["within"]) > 3 * abs(hard["mix"])
    check_sums(found)


def check_sums(found: Drop) -> None:
    """Each split adds up to the whole change, and so do its two halves."""
    totals: dict[str, float] = defaultdict(float)
    for row in found.splits:
        totals[row["dimension"]] += row["change"]
        if row["mix"] is not None:
            assert row["within"] + row["mix"] == pytest.approx(row["change"], abs=1e-12)
    assert {"taskset", "task_id", "length", "finish_reason", "part"} <= set(totals)
    assert list(totals.values()) == pytest.approx([found.change] * len(totals), abs=1e-9)


def test_the_taskset_that_got_worse_explains_the_drop(store: Store) -> None:
    check_drop(store, seed=0)


def test_a_change_by_chance_is_not_explained(store: Store) -> None:
    found = drop(History(0).write(store), "r", LATE, EARLY)
    assert found.findings == []
    assert found.low < 0 < found.high
    check_sums(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_drops_are_explained_and_chance_is_not_at_every_seed(seed: int, store: Store) -> None:
    check_drop(store, seed)
    assert drop(History(seed, run_id="clean").write(store), "clean", LATE, EARLY).findings == []


def test_more_rows_of_the_harder_taskset_are_a_matter_of_the_mix(store: Store) -> None:
    history = History(5)
    kept = [
        row
        for row in history.rows
        if row["batch"] <= 10
        or history.taskset[row["task_id"]] == "hard"
        or row["group_id"].endswith("1")
    ]
    history.rows = kept
    found = drop(history.write(store), "r", LATE, EARLY)
    mix = sum(r["mix"] for r in found.splits if r["dimension"] == "taskset")
    assert mix / found.change > 0.7
    assert any("taskset" in f and "its share of the rows from" in f for f in found.findings)
    check_sums(found)


def test_a_penalty_that_came_later_explains_the_drop_as_a_part(store: Store) -> None:
    history = History(6)
    history.change(
        lambda r: r["batch"] > 10 and history.rng.random() < 0.6,
        reward=lambda r: r["reward"] - 0.5,
        rewards=lambda r: [*r["rewards"], {"name": "too_long", "value": -0.5}],
    )
    found = drop(history.write(store), "r", LATE, EARLY)
    assert found.findings[1].startswith("part too_long explains")
    assert found.findings[-1].startswith("it is everywhere")
    assert len(found.findings) == 3
    check_sums(found)


def test_ranges_that_hold_nothing_or_overlap_are_refused(store: Store) -> None:
    history = History(7, steps=4, groups=2)
    history.write(store)
    with pytest.raises(JobError, match=r"steps 50:60 of run `r` have no row .* steps are 1:4"):
        drop(store, "r", (50, 60), (1, 2))
    with pytest.raises(QueryError, match=r"steps 2:4 and 1:2 overlap"):
        drop(store, "r", (2, 4), (1, 2))
    for text in ("a", "3:1", "1:2:3", ""):
        with pytest.raises(QueryError, match="`--steps` must be two steps"):
            parse_steps(text, "--steps")


def test_a_reward_that_never_changes_is_no_division_by_zero(store: Store) -> None:
    history = History(8, steps=4, groups=4)
    history.change(lambda _: True, reward=1.0, rewards=[{"name": "correct", "value": 1.0}])
    found = drop(history.write(store), "r", (3, 4), (1, 2))
    assert (found.change, found.findings, found.p) == (0.0, [], 1.0)
    json.dumps(vars(found))


SPLIT = """
WITH bins AS (
    SELECT taskset AS bin,
           count(*) FILTER (step <= 10) AS n, avg(reward) FILTER (step <= 10) AS m,
           count(*) FILTER (step > 10) AS n2, avg(reward) FILTER (step > 10) AS m2
    FROM trained_rows WHERE run_id = 'r' AND isfinite(reward) GROUP BY bin)
SELECT bin, change_within(n, m, n2, m2), change_mix(n, m, n2, m2) FROM bins
"""


def test_a_change_is_split_as_the_audit_splits_it(store: Store) -> None:
    history = History(5)
    # fewer rows of one taskset, and one that is only there later
    history.rows = [
        row
        for row in history.rows
        if row["batch"] <= 10
        or history.taskset[row["task_id"]] == "hard"
        or row["group_id"].endswith("1")
    ]
    history.change(lambda r: r["batch"] > 15 and r["group_id"].endswith("7"), task_id="gone")
    history.write(store)
    found = drop(store, "r", (11, 20), (1, 10))
    own = {r["bin"]: (r["within"], r["mix"]) for r in found.splits if r["dimension"] == "taskset"}
    bins = {bin or "(none)": parts for bin, *parts in store.sql(SPLIT).fetchall()}
    assert len(bins) == 3
    assert bins.keys() == own.keys()
    for name, parts in bins.items():
        assert parts == pytest.approx(own[name], abs=1e-9)
    assert math.fsum(x for parts in bins.values() for x in parts) == pytest.approx(found.change)
