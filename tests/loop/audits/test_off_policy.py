"""`rlake audit off-policy`: against independent sums in float64, and against known truths."""

import math
from typing import Any

import numpy as np
import pytest
from support.builders import experiences

from rlake.loop.audits import OffPolicy, off_policy
from rlake.store import Store
from rlake.store.errors import JobError, NotFoundError, QueryError

Row = dict[str, Any]
TOKENS = 3


class Bandit:
    """Tasks with four answers of three tokens each: what either policy earns is known exactly."""

    def __init__(self, seed: int, *, tasks: int = 40, distance: float = 1.0) -> None:
        self.rng = np.random.default_rng(seed)
        logits = self.rng.normal(0, 1, (tasks, 4))
        moved = logits + distance * self.rng.normal(0, 1, (tasks, 4))
        self.behavior, self.target = (
            np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits, moved)
        )
        self.means = self.rng.random((tasks, 4))
        self.truth = float((self.target * self.means).sum(1).mean())

    def rows(self, *, groups: int = 4, size: int = 4, run_id: str = "r") -> list[Row]:
        """Sample groups of rollouts of each task; the chance of an answer is that of its tokens."""
        made: list[Row] = []
        for task, chances in enumerate(self.behavior):
            for group in range(groups):
                for i, answer in enumerate(self.rng.choice(4, size, p=chances)):
                    reward = float(self.rng.random() < self.means[task, answer])
                    name = f"{run_id}/{task:03d}/{group}"
                    made.append(
                        {
                            "experience_id": f"{name}/{i}",
                            "run_id": run_id,
                            "task_id": f"t{task}",
                            "group_id": name,
                            "rollout_index": i,
                            "source": "explorer",
                            "reward": reward,
                            "response_text": str(answer),
                            "token_ids": [0] * (TOKENS + 1),
                            "loss_mask": [False] + [True] * TOKENS,
                            "logprobs": self.tokens(chances[answer]),
                            "teacher_logprobs": self.tokens(self.target[task, answer]),
                        }
                    )
        return made

    def tokens(self, chance: float) -> list[float]:
        """Split a chance over the tokens; the prompt's token counts for nothing."""
        parts = self.rng.dirichlet(np.ones(TOKENS)) * math.log(chance)
        return [7.0, *parts.tolist()]


def values(found: OffPolicy) -> dict[str, float]:
    return {value.name: value.value for value in found.values}


def studentized(rows: list[Row], each: list[float]) -> tuple[float, float]:
    """The bootstrap-t interval of a mean over tasks, resample by resample."""
    names = sorted({row["task_id"] for row in rows})
    of = {t: [v for r, v in zip(rows, each, strict=True) if r["task_id"] == t] for t in names}
    count = len(names)

    def mean_and_error(chosen: list[str]) -> tuple[float, float]:
        n = sum(len(of[t]) for t in chosen)
        mean = math.fsum(math.fsum(of[t]) for t in chosen) / n
        sums = [math.fsum(of[t]) - mean * len(of[t]) for t in chosen]
        return mean, math.sqrt(math.fsum(x * x for x in sums) * count / (count - 1)) / n

    mean, error = mean_and_error(names)
    draws = np.random.default_rng(0).integers(count, size=(1000, count))
    found = [mean_and_error([names[i] for i in draw]) for draw in draws]
    far = np.quantile([(m - mean) / e for m, e in found], (0.025, 0.975))
    return mean - far[1] * error, mean - far[0] * error


def test_estimates_equal_sums_worked_out_row_by_row(store: Store) -> None:
    rows = Bandit(0).rows()
    store.append("experiences", rows)
    found = off_policy(store, "r", target="teacher_logprobs")
    w = [
        math.exp(
            math.fsum(np.float32(x) for x in r["teacher_logprobs"][1:])
            - math.fsum(np.float32(x) for x in r["logprobs"][1:])
        )
        for r in rows
    ]
    r = [row["reward"] for row in rows]
    n = len(rows)
    robust = []
    for i, row in enumerate(rows):
        others = [q["reward"] for q in rows if q["task_id"] == row["task_id"] and q is not row]
        m = math.fsum(others) / len(others)
        robust.append(m + w[i] * (r[i] - m))
    expected = {
        "logged": math.fsum(r) / n,
        "importance_sampling": math.fsum(a * b for a, b in zip(w, r, strict=True)) / n,
        "self_normalized": math.fsum(a * b for a, b in zip(w, r, strict=True)) / math.fsum(w),
        "doubly_robust": math.fsum(robust) / n,
    }
    assert values(found) == pytest.approx(expected, rel=1e-12)
    ess = math.fsum(w) ** 2 / math.fsum(x * x for x in w)
    assert found.effective_rows == pytest.approx(ess, rel=1e-12)
    assert found.largest_share == pytest.approx(max(w) / math.fsum(w), rel=1e-12)
    [last] = [value for value in found.values if value.name == "doubly_robust"]
    assert (last.low, last.high) == pytest.approx(studentized(rows, robust), rel=1e-9)
    assert "would have earned" in found.findings[0]


def test_a_side_column_with_the_sum_of_a_row_gives_the_same(store: Store) -> None:
    rows = Bandit(1).rows()
    store.append("experiences", rows)
    sums = [
        {
            "experience_id": row["experience_id"],
            "name": "target_logprob",
            "version": "1",
            "value": float(np.sum(np.float32(row["teacher_logprobs"][1:]), dtype=np.float64)),
        }
        for row in rows
    ]
    store.append("experience_values", sums)
    by_token = values(off_policy(store, "r", target="teacher_logprobs"))
    assert values(off_policy(store, "r", target="derived:target_logprob")) == pytest.approx(
        by_token
    )


def test_a_rule_is_a_policy_that_samples_until_a_row_is_kept(store: Store) -> None:
    bandit = Bandit(2)
    rows = bandit.rows()
    store.append("experiences", rows)
    found = off_policy(store, "r", weight="response_text <> '0' -- no zeros")
    kept: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["task_id"]] = sizes.get(row["task_id"], 0) + 1
        if row["response_text"] != "0":
            kept.setdefault(row["task_id"], []).append(row["reward"])
    of = sum(sizes[t] for t in kept)
    mean = sum(sizes[t] * sum(r) / len(r) for t, r in kept.items()) / of
    assert values(found)["self_normalized"] == pytest.approx(mean, rel=1e-12)
    assert found.num_without_support == 40 - len(kept)
    chances = bandit.behavior[:, 1:] / bandit.behavior[:, 1:].sum(1, keepdims=True)
    truth = float((chances * bandit.means[:, 1:]).sum(1).mean())
    [estimate] = [value for value in found.values if value.name == "self_normalized"]
    assert estimate.low < truth < estimate.high


@pytest.mark.slow
def test_intervals_cover_the_truth_in_nine_of_ten_logs_where_they_are_given(store: Store) -> None:
    hits: dict[str, int] = {}
    truths: list[float] = []
    rows: list[Row] = []
    for seed in range(100):
        # the truth is of 400 tasks, of which the log has 40
        whole = Bandit(seed, tasks=400)
        truths.append(whole.truth)
        chosen = whole.rng.choice(400, 40, replace=False)
        for name in ("behavior", "target", "means"):
            setattr(whole, name, getattr(whole, name)[chosen])
        rows += whole.rows(run_id=f"r{seed}")
    store.append("experiences", rows)
    now = store.at(store.versions())
    logs = [off_policy(now, f"r{seed}", target="teacher_logprobs") for seed in range(100)]
    given = [(log, truth) for log, truth in zip(logs, truths, strict=True) if log.refusal is None]
    assert len(given) >= 80
    for log, truth in given:
        for value in log.values[1:]:
            hits[value.name] = hits.get(value.name, 0) + (value.low <= truth <= value.high)
    assert min(hits.values()) >= 0.9 * len(given), hits


def test_a_target_that_is_too_far_is_refused_with_its_numbers(store: Store) -> None:
    store.append("experiences", Bandit(3, tasks=20, distance=0.5).rows(run_id="near"))
    store.append("experiences", Bandit(3, tasks=20, distance=8.0).rows(run_id="far"))
    assert off_policy(store, "near", target="teacher_logprobs").refusal is None
    found = off_policy(store, "far", target="teacher_logprobs")
    assert found.refusal is not None
    assert "are worth" in found.refusal
    assert "one that is nearer" in found.refusal
    assert [value.name for value in found.values] == ["logged"]


def test_weights_that_are_not_numbers_are_left_out_and_infinite_ratios_refused(
    store: Store,
) -> None:
    rows = Bandit(3, tasks=20, distance=0.5).rows()
    store.append("experiences", rows)
    rule = "CASE WHEN rollout_index = 0 THEN 'nan'::DOUBLE ELSE 1 END"
    found = off_policy(store, "r", weight=rule)
    assert found.num_left_out == sum(row["rollout_index"] == 0 for row in rows)
    assert found.refusal is None
    for row in rows[:1]:
        row["logprobs"] = [None if x is None else -1e4 for x in row["logprobs"]]
    others = [{**r, "experience_id": f"far/{r['experience_id']}", "run_id": "far"} for r in rows]
    store.append("experiences", others)
    assert "are worth 0.0" in str(off_policy(store, "far", target="teacher_logprobs").refusal)


def test_log_probs_of_another_temperature_are_noticed(store: Store) -> None:
    rows = Bandit(4, distance=0.2).rows(groups=8)
    for row in rows:
        row["teacher_logprobs"] = [x * 0.7 for x in row["teacher_logprobs"]]
    store.append("experiences", rows)
    found = off_policy(store, "r", target="teacher_logprobs")
    assert any(f.startswith("the weights have a mean of") for f in found.findings)
    honest = Bandit(4, distance=0.2).rows(groups=8, run_id="honest")
    store.append("experiences", honest)
    told = off_policy(store, "honest", target="teacher_logprobs").findings
    assert len(told) == 1


def test_what_cannot_be_estimated_is_refused(store: Store) -> None:
    store.append("experiences", experiences(8, reward=1.0, run_id="r"))
    for given, kind, message in [
        ({}, QueryError, "give either `target` or `weight`, got both or none"),
        ({"target": "teacher_logprob"}, QueryError, "did you mean `teacher_logprobs`"),
        ({"target": "teacher_logprobs"}, JobError, "none of the 8 rows of run `r` has a reward"),
        ({"target": "derived:nothing"}, NotFoundError, "no derived value"),
        ({"weight": "rewrad > 1"}, QueryError, "`reward`"),
        ({"weight": "-1"}, QueryError, "must not be negative, got -1"),
        ({"weight": "1", "where": "reward > 5"}, JobError, "no row to train on that matches"),
    ]:
        with pytest.raises(kind, match=message):
            off_policy(store, "r", **given)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="no run `rr`; did you mean `r`"):
        off_policy(store, "rr", weight="1")


def test_importance_weights_are_those_of_the_estimate(store: Store) -> None:
    store.append("experiences", Bandit(0).rows())
    found = off_policy(store, "r", target="teacher_logprobs")
    [(estimate, size)] = store.sql(
        "SELECT avg(w * reward), effective_sample_size(w) FROM (SELECT reward, "
        "importance_weight(teacher_logprobs, logprobs, loss_mask) AS w FROM experiences)"
    ).fetchall()
    [own] = [one.value for one in found.values if one.name == "importance_sampling"]
    assert (estimate, size) == pytest.approx((own, found.effective_rows), rel=1e-9)
