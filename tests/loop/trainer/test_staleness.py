"""Rows of older policies: how old they are, whether they may be trained on, and what they cost."""

from pathlib import Path
from statistics import mean
from typing import Any

import polars as pl
import pytest
from bench.staleness import configured, learned, warm_start
from support.tiny_models import config, offline, table, written

import rlake
from rlake.loop.run import run, train
from rlake.loop.trainer.lag_metrics import BUCKETS, lags
from rlake.store import Store
from rlake.store.errors import JobError


def measured(store: Store, name: str) -> dict[int, float]:
    """Return a metric's value at each step."""
    rows = table(store, f"metrics WHERE name = 'train/{name}' ORDER BY step", "step, value")
    return dict(rows.iter_rows())


def test_every_lag_is_counted_once() -> None:
    ages = [*range(40), None, None]
    found = lags(pl.Series(ages))
    assert sum(found[f"train/lag_{name}"] for name in BUCKETS) == 40
    assert found["train/lag_unknown"] == 2
    assert [found[f"train/lag_{name}"] for name in BUCKETS] == [1, 1, 1, 1, 4, 8, 24]
    assert (found["train/lag_mean"], found["train/lag_max"]) == (19.5, 39)


def test_lags_that_are_not_known_are_no_zeros() -> None:
    found = lags(pl.Series([None, None], dtype=pl.Int64))
    assert {name for name, value in found.items() if value} == {"train/lag_unknown"}
    assert "train/lag_mean" not in found


def test_the_histogram_of_a_run_is_that_of_its_draws(store: Store) -> None:
    run(store, config(schedule={"max_ahead": 3}, trainer={"steps": 7}))
    drawn = store.sql("SELECT step, lag, count(*) FROM draws GROUP BY ALL").fetchall()
    assert {lag for _, lag, _ in drawn} == {0, 1, 2, 3}
    for step, lag, count in drawn:
        assert measured(store, f"lag_{lag}")[step] == count == 6
    assert set(measured(store, "lag_4_7").values()) == {0.0}


def test_rows_of_other_runs_have_a_lag_that_is_not_known(store: Store) -> None:
    store.append("experiences", written(8, policy_version=3, run_id="elsewhere"))
    train(store, offline(algorithm="grpo", trainer={"batch_size": 2}))
    assert measured(store, "lag_unknown") == {1: 8.0}
    assert measured(store, "lag_mean") == {}


CORRECTED = {"grpo": {"group_size": 3, "correction": {"decoupled": True}}}


def test_a_corrected_run_measures_what_its_stale_rows_count(store: Store) -> None:
    stale = {"schedule": {"max_ahead": 2}, "trainer": {"steps": 5, "learning_rate": 3e-2}}
    run(store, config(algorithm=CORRECTED, **stale))
    mismatch, ess = measured(store, "mismatch_kl"), measured(store, "importance_ess")
    assert abs(mismatch[1]) < 1e-6  # fresh, and both log-probs are the trainer's own
    assert ess[1] == pytest.approx(1, abs=1e-5)
    assert mismatch[5] > 1e-4
    assert ess[5] < 1 - 1e-4
    assert set(measured(store, "ratio").values()) == {1.0}  # to the policy before the step


REFUSED = (
    r"^experience `.*` has no logprobs, and this algorithm needs them; leave such rows out with "
    r"`trainer.where: logprobs IS NOT NULL`, or .*`trainer.missing_logprobs: recompute`$"
)


def test_rows_without_logprobs_are_refused_by_name(store: Store) -> None:
    rows = written(8)
    store.append("experiences", [*rows[:4], *written(8, logprobs=None)[4:]])
    settings: dict[str, Any] = {"algorithm": "grpo", "trainer": {"batch_size": 1}}
    with pytest.raises(JobError, match=REFUSED.replace(".*` has", "g001/0.` has")):
        train(store, offline(**settings))
    settings["trainer"] |= {"where": "logprobs IS NOT NULL"}
    train(store, offline(**settings, name="others"))


def test_an_online_run_whose_workflow_keeps_no_logprobs_is_refused(store: Store) -> None:
    with pytest.raises(JobError, match=REFUSED):
        run(store, config(explorer={"workflow": "support.runs:forgets_logprobs"}))


def test_what_needs_no_logprobs_trains_without(store: Store) -> None:
    store.append("experiences", written(4, logprobs=None))
    train(store, offline())
    assert store.count("draws") == 4


def test_where_it_is_asked_for_the_policy_before_the_step_stands_for_the_one_that_wrote(
    store: Store,
) -> None:
    rows = written(8, response=[3, 5, 2, 4, 3, 3, 6, 3])
    forgotten = written(8, response=[3, 5, 2, 4, 3, 3, 6, 3], logprobs=None)
    store.append("experiences", [*rows[:4], *forgotten[4:]])
    again = {"missing_logprobs": "recompute", "batch_size": 1, "learning_rate": 1e-2}
    train(store, offline(algorithm="grpo", trainer=again))
    assert measured(store, "recomputed_rows") == {1: 0.0, 2: 4.0}
    ratios = measured(store, "ratio")
    assert abs(ratios[1] - 1) > 0.01  # these rows' own log-probs are somebody else's
    assert ratios[2] == pytest.approx(1, abs=1e-5)
    assert measured(store, "kl")[2] == pytest.approx(0, abs=1e-6)


def test_an_online_run_may_recompute_what_its_workflow_did_not_keep(store: Store) -> None:
    forgetful = {"workflow": "support.runs:forgets_logprobs"}
    again = {"missing_logprobs": "recompute"}
    run(store, config(explorer=forgetful, schedule={"max_ahead": 1}, trainer=again))
    assert measured(store, "recomputed_rows") == {1: 6.0, 2: 6.0, 3: 6.0}
    assert list(measured(store, "ratio").values()) == pytest.approx([1.0] * 3, abs=1e-5)
    # nothing is left of how stale they were
    assert measured(store, "lag_1") == {1: 0.0, 2: 6.0, 3: 6.0}


@pytest.mark.long
def test_uncorrected_training_on_rows_four_steps_old_falls_behind_corrected(tmp_path: Path) -> None:
    """The shape of arXiv:2505.24298, table 2, on sums of digits, for each of three seeds."""
    store = rlake.connect(tmp_path / "lake")
    warm = warm_start(store)
    rewards = {
        case: [
            learned(
                store, configured(warm, case=case, lag=4, seed=seed, steps=16, learning_rate=3e-3)
            )
            for seed in range(3)
        ]
        for case in ("uncorrected", "corrected")
    }
    assert min(rewards["corrected"]) > max(rewards["uncorrected"])
    assert mean(rewards["corrected"]) > mean(rewards["uncorrected"]) + 0.1
    ages = store.sql(
        "SELECT lag, count(*) FROM draws WHERE step > 5 AND lag IS NOT NULL GROUP BY 1"
    )
    assert [lag for lag, _ in ages.fetchall()] == [4]
