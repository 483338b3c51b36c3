"""`rlake audit bias`: what the trained rows differ in from the sampled ones, and what made it."""

import numpy as np
import polars as pl
import pytest
from support.histories import SEEDS, History, Row
from support.table_rows import event

from rlake.loop.audits import bias
from rlake.loop.audits.clustered import by_bin
from rlake.store import Store
from rlake.store.errors import JobError, NotFoundError


def lossy(seed: int, run_id: str = "r") -> History:
    """A run that loses a tenth of its groups and of its rows, whatever they are."""
    history = History(seed, run_id=run_id)
    lost = {r["group_id"] for r in history.rows if r["rollout_index"] == 0}
    lost = {group for group in sorted(lost) if history.rng.random() < 0.1}
    history.change(lambda r: r["group_id"] in lost, drop_reason="sample: not chosen")
    history.change(lambda _: history.rng.random() < 0.1, drop_reason="sample: not chosen")
    return history


def with_plants(seed: int) -> History:
    """A filter of long rows, and an engine whose weights are too old to be drawn."""
    history = History(seed)
    history.change(
        lambda r: r["num_tokens"] > 60 and history.rng.random() < 0.8,
        drop_reason="max_length: too long",
    )
    history.change(
        lambda r: r["group_id"].endswith("3"),
        engine="far",
        policy_version=lambda r: max(0, r["policy_version"] - 6),
    )
    return history


def is_fresh(row: Row) -> bool:
    return row["batch"] - 1 - row["policy_version"] <= 2


def check_plants(store: Store, seed: int) -> None:
    found = bias(with_plants(seed).write(store, drawn=is_fresh), "r").findings
    longest = [f for f in found if f.startswith("length ") and "on less" in f]
    assert longest
    assert all("are dropped by max_length" in f for f in longest)
    (far,) = [f for f in found if f.startswith("engine far: trained on less")]
    assert far.endswith("are stale")
    assert not [f for f in found if f.startswith(("taskset", "difficulty", "source"))]


def test_a_length_filter_and_a_stale_engine_are_found_with_what_removed_the_rows(
    store: Store,
) -> None:
    check_plants(store, seed=0)


def test_a_run_that_loses_rows_by_chance_has_no_findings(store: Store) -> None:
    found = bias(lossy(0).write(store), "r")
    assert found.findings == []
    outcomes = {row["outcome"]: row["rows"] for row in found.outcomes}
    assert set(outcomes) == {"trained", "dropped by sample"}
    assert sum(outcomes.values()) == found.num_rows == 20 * 16 * 4
    assert any("cut at the token limit" in fact for fact in found.facts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_plants_are_found_and_chance_is_not_at_every_seed(seed: int, store: Store) -> None:
    check_plants(store, seed)
    assert bias(lossy(seed, run_id="clean").write(store), "clean").findings == []


def test_a_source_that_is_trained_on_late_is_found_by_its_lag(store: Store) -> None:
    history = History(1)
    history.max_lag = 10
    history.change(
        lambda r: r["group_id"].endswith("3"),
        source="served",
        policy_version=lambda r: max(0, r["policy_version"] - 6),
    )
    found = bias(history.write(store), "r").findings
    assert any(f.startswith("source served: trained at a mean lag of") for f in found)
    assert not [f for f in found if "trained on less" in f or "trained on more" in f]


def test_rows_that_still_wait_are_not_compared(store: Store) -> None:
    history = History(2)
    found = bias(history.write(store, drawn=lambda r: r["batch"] <= 15), "r")
    assert (found.num_rows, found.num_waiting) == (15 * 64, 5 * 64)
    assert found.findings == []


def test_few_groups_never_suffice(store: Store) -> None:
    history = History(3, steps=1, groups=10, size=40)
    history.change(lambda r: r["group_id"] < "r/000001/0003", drop_reason="odd: one", engine="far")
    assert bias(history.write(store), "r").findings == []


def test_scores_and_intervals_equal_those_worked_out_cluster_by_cluster() -> None:
    rng = np.random.default_rng(0)
    rows = pl.DataFrame(
        {
            "g": [str(i) for i in rng.integers(0, 60, 500)],
            "b": [str(i) for i in rng.integers(0, 3, 500)],
            "y": rng.random(500),
        }
    )
    groups, bins, y = (rows[c].to_numpy() for c in ("g", "b", "y"))
    names = np.unique(groups)
    for row in by_bin(rows, "b", "y", cluster="g").iter_rows(named=True):
        own = bins == row["b"]
        scores = (own - own.mean()) * (y - y.mean())
        sums = np.array([scores[groups == g].sum() for g in names])
        z = scores.sum() / np.sqrt((sums**2).sum() * len(names) / (len(names) - 1))
        mean, n = y[own].mean(), own.sum()
        of = np.array([(y - mean)[own & (groups == g)].sum() for g in np.unique(groups[own])])
        more = ((y.mean() - mean) * n / len(of)) ** 2
        half = 1.959963984540054 * np.sqrt(((of**2).sum() + more) * len(of) / (len(of) - 1)) / n
        assert row["z"] == pytest.approx(z, rel=1e-9)
        assert row["mean"] == pytest.approx(mean, rel=1e-12)
        assert row["rest"] == pytest.approx(y[~own].mean(), rel=1e-12)
        assert (row["low"], row["high"]) == pytest.approx((mean - half, mean + half), rel=1e-9)


def test_an_unknown_run_and_one_without_steps_say_so(store: Store) -> None:
    store.append("job_events", [event(run_id="mine")])
    with pytest.raises(NotFoundError, match="no run `mien`; did you mean `mine`"):
        bias(store, "mien")
    with pytest.raises(JobError, match="`mine` has trained no step"):
        bias(store, "mine")


def test_a_past_state_is_audited_as_it_was(store: Store) -> None:
    history = History(4)
    store.snapshot("empty")
    history.write(store)
    store.snapshot("after")
    assert bias(store.at("after"), "r").num_rows == 20 * 64
    with pytest.raises(NotFoundError, match="no run `r`"):
        bias(store.at("empty"), "r")


def test_a_run_that_sampled_nothing_says_so(store: Store) -> None:
    history = History(5, steps=2)
    history.change(lambda _: True, run_id=None, source="imported")
    found = bias(history.write(store), "r")
    assert (found.num_rows, found.num_foreign, found.findings) == (0, 128, [])
    assert found.facts == ["the run sampled no row: it drew 128"]
