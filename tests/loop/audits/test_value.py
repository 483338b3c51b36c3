"""`rlake audit value`: which rows moved the policy most, and runs that left out a source."""

import json
import math

import numpy as np
import pytest
from support.histories import SEEDS, History, Row
from support.table_rows import event

from rlake.loop.audits import value
from rlake.store import Store
from rlake.store.errors import JobError, NotFoundError


def with_tokens(history: History, *, doubtful: str = "") -> History:
    """Give rows log-probs; those of the source `served` are of texts that the policy doubts."""

    def logprobs(row: Row) -> list[float]:
        scale = 2.0 if row["source"] == doubtful else 0.1
        return [0.0, *(-history.rng.exponential(scale, 19)).tolist()]

    history.change(
        lambda _: True,
        num_tokens=20,
        token_ids=[1] * 20,
        loss_mask=[False] + [True] * 19,
        logprobs=logprobs,
    )
    return history


def with_a_stale_source(seed: int) -> History:
    history = History(seed)
    history.change(lambda r: r["group_id"].endswith("3"), source="served")
    return with_tokens(history, doubtful="served")


def check_source(store: Store, seed: int) -> None:
    [found] = value(with_a_stale_source(seed).write(store), "r").findings
    assert found.startswith("source served: 12.5 % of the draws and ")


def test_a_source_that_the_policy_doubts_is_found_by_its_push(store: Store) -> None:
    check_source(store, seed=0)


def test_rows_like_others_have_no_findings_and_pushes_are_as_worked_out(store: Store) -> None:
    history = with_tokens(History(0, steps=6))
    found = value(history.write(store), "r")
    assert found.findings == []
    pushes = {
        row["experience_id"]: abs(row["reward"] - 0.5)
        * math.fsum(1 - math.exp(np.float32(x)) for x in row["logprobs"][1:])
        for row in history.rows
    }
    whole = math.fsum(pushes.values())
    best = sorted(pushes, key=lambda i: -pushes[i])[:20]
    assert [row["experience_id"] for row in found.top] == best
    assert [row["share"] for row in found.top] == pytest.approx([pushes[i] / whole for i in best])
    first = next(row for row in history.rows if row["experience_id"] == best[0])
    mean = -math.fsum(np.float32(x) for x in first["logprobs"][1:]) / 19
    assert found.top[0]["surprise"] == pytest.approx(mean, rel=1e-12)
    totals = {d: sum(r["push"] for r in found.bins if r["dimension"] == d) for d in ("taskset",)}
    assert totals["taskset"] == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_doubted_sources_are_found_and_chance_is_not_at_every_seed(seed: int, store: Store) -> None:
    check_source(store, seed)
    with_tokens(History(seed, run_id="clean")).write(store)
    assert value(store, "clean").findings == []


def other_run(store: Store, seed: int, *, better: float) -> None:
    """Store a second run over the same tasks, without the source `served`."""
    history = with_tokens(History(seed, run_id="b"))
    history.change(lambda r: history.rng.random() < better, reward=1.0)
    config = json.dumps({"seed": 1, "name": "b", "schedule": {"max_lag": 2}})
    history.write(store, config=config)


def test_a_run_without_a_source_that_ends_better_is_compared_task_by_task(store: Store) -> None:
    with_a_stale_source(1).write(store)
    other_run(store, 2, better=0.5)
    found = value(store, "r", against=["b"])
    [row] = found.comparisons
    assert row["without"] == ["source served"]
    assert row["also_differ"] == ["seed"]
    assert row["tasks"] >= 20
    assert row["low"] > 0
    assert found.findings[-1].startswith("without source served, run `b` is 0.")
    assert "they also differ in seed" in found.findings[-1]


def test_runs_that_earn_the_same_are_no_finding(store: Store) -> None:
    with_tokens(History(1)).write(store)
    other_run(store, 1, better=0.0)
    found = value(store, "r", against=["b"])
    assert found.findings == []
    assert found.comparisons[0]["without"] == []


def test_the_proxy_is_held_against_the_gradient_norms_of_the_trainer(store: Store) -> None:
    history = with_tokens(History(3, steps=12))
    history.write(store)
    norm = {"run_id": "r", "attempt": 1, "job": "train", "name": "train/grad_norm"}
    store.append("metrics", [norm | {"step": s, "value": float(s)} for s in range(1, 13)])
    assert any("rank correlation of" in fact for fact in value(store, "r").facts)


def test_runs_without_log_probs_and_unknown_ones_say_so(store: Store) -> None:
    History(4, steps=2).write(store)
    store.append("job_events", [event(run_id="fresh")])
    with pytest.raises(JobError, match="no row that run `r` was trained on has `logprobs`"):
        value(store, "r")
    with pytest.raises(NotFoundError, match="no run `rr`; did you mean `r`"):
        value(store, "r", against=["rr"])
    with pytest.raises(JobError, match="`fresh` has trained no step"):
        value(store, "r", against=["fresh"])


def test_the_push_of_a_draw_is_that_of_the_audit(store: Store) -> None:
    with_tokens(History(0, steps=6)).write(store)
    found = value(store, "r")
    rows = store.sql(
        "SELECT experience_id, abs(t.weight * t.advantage) * doubt(logprobs, loss_mask) AS push, "
        "sampled_logprob(logprobs, loss_mask) FROM trained_rows t JOIN experiences e "
        "USING (experience_id) WHERE t.run_id = 'r' ORDER BY push DESC, experience_id"
    ).fetchall()
    whole = math.fsum(push for _, push, _ in rows)
    for (name, push, logprob), own in zip(rows, found.top, strict=False):
        assert name == own["experience_id"]
        assert push / whole == pytest.approx(own["share"], rel=1e-9)
        assert -logprob / 19 == pytest.approx(own["surprise"], rel=1e-9)


def test_the_doubt_of_a_token_that_is_almost_certain_keeps_its_digits(store: Store) -> None:
    [(found,)] = store.sql("SELECT doubt([-1e-20, -3.0], [true, false])").fetchall()
    assert found == pytest.approx(1e-20, rel=1e-12)
    [row] = store.sql("SELECT doubt([], []), sampled_logprob([-1.0], [false])").fetchall()
    assert row == (None, None)
