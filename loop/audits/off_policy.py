"""What another policy, sampling rule or filter would have earned on logged rollouts.

Importance sampling: no rollout is made. It holds for answers that the logging policy gives with a
chance that is not tiny; where few rows carry all weight it is refused. It cannot see answers that
were never sampled, nor what another policy would learn later.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from ...store import Store, query_scope
from ...store import side_columns as sides
from ...store.errors import JobError, QueryError, nearest
from ...store.query import literal
from ...store.schema import PER_TOKEN
from .clustered import CONFIDENCE
from .history import of_run, share
from .token_sums import token_sums

LEAST_ESS = 100.0
"""The least effective sample size with which a value is estimated."""
LARGEST_SHARE = 0.1
"""The largest share of all weight that one row may have."""
LEAST_OFF = 0.05
"""A mean weight that is nearer to 1 is not a finding."""
MANY_TASKS = 30
"""From so many tasks on, the rows of a task are one cluster, else those of a group."""
SEED, RESAMPLES = 0, 1000
"""Of the bootstrap."""
_ENDS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
_CELLS = 1 << 21
"""Most numbers that are resampled at once."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """An estimate of the mean reward with its 95 % interval, a bootstrap-t of whole clusters."""

    name: str
    """logged, importance_sampling, self_normalized or doubly_robust."""
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class OffPolicy:
    """What a target policy or rule would have earned."""

    run_id: str
    target: str
    num_rows: int
    """Rows with a reward and a weight."""
    num_left_out: int
    """Rows without one of them."""
    num_tasks: int
    num_without_support: int
    """Tasks of which the rule keeps no row: their value is not known, and they are left out."""
    effective_rows: float
    """Kish's effective sample size, Σw² over the sum of the squares."""
    largest_share: float
    """Share of all weight of the row that has most."""
    weight_mean: float | None
    """Mean importance weight, which is 1 in expectation; None for a rule."""
    values: list[Value]
    """`logged` first; nothing else when the estimate is refused."""
    refusal: str | None
    """Why nothing is estimated."""
    findings: list[str]


def off_policy(
    store: Store,
    run_id: str,
    *,
    target: str | None = None,
    weight: str | None = None,
    reward: str | None = None,
    where: str | None = None,
) -> OffPolicy:
    """Estimate what a policy or a rule would have earned on the rows that a run sampled.

    `target` has the log-probs of another policy: a column of `experiences` with one a token
    (`teacher_logprobs`), or a side column such as `derived:target_logprob` with the sum over the
    sampled tokens of a row, at the row's temperature. Its estimates are importance sampling,
    self-normalized, and doubly robust with the mean reward of the task's other rows. `weight` is a
    rule in SQL, a number or a truth value of each row: it is a policy that samples until a row is
    kept, so that weights are relative to the mean of their task. `reward` is a side column that
    takes the place of the reward, `where` a condition on rows.

    Raises NotFoundError for an unknown run, QueryError for a target, rule or condition that is not
    one, and JobError when no row has all that is needed.
    """
    if (target is None) == (weight is None):
        raise QueryError("give either `target` or `weight`, got both or none")
    now = of_run(store, run_id, with_steps=False)
    given = [name for name in (target, reward) if name is not None and ":" in name]
    specs = {"reward": reward, "target": target if target in given else None}
    columns = sides.parse_all([f"{name}={spec}" for name, spec in specs.items() if spec])
    sides.check(now, columns)
    rows = _rows(now, run_id, columns, weight=weight, where=where)
    if not rows.height:
        raise JobError(
            f"run `{run_id}` has no row to train on{f' that matches {where!r}' if where else ''}"
        )
    if target is not None:
        rows = rows.with_columns(w=_ratios(now, rows, target, is_side=target in given))
    # an infinite ratio stays: such a row has all of the weight, which is refused
    known = rows.filter(pl.col("reward").is_finite() & pl.col("w").is_not_null())
    known = known.filter(pl.col("w").is_not_nan() & (pl.col("w").is_finite() | (weight is None)))
    if not known.height:
        needs = "a reward and a weight" if weight else "a reward, `logprobs` and target log-probs"
        raise JobError(f"none of the {rows.height:,} rows of run `{run_id}` has {needs}")
    if (known["w"] < 0).any():
        raise QueryError(f"`weight` must not be negative, got {known['w'].min()} from {weight!r}")
    return _estimated(
        known, run_id, target=target, rule=weight, left_out=rows.height - known.height
    )


def _rows(
    store: Store,
    run_id: str,
    columns: Sequence[sides.SideColumn],
    *,
    weight: str | None,
    where: str | None,
) -> pl.DataFrame:
    source = f"{sides.from_sql(columns)} AS experiences"
    rule = f"({weight}\n)::DOUBLE" if weight else "NULL::DOUBLE"
    extra = ", target::DOUBLE AS target" if any(c.alias == "target" for c in columns) else ""
    condition = f" AND ({where}\n)" if where else ""
    return store.sql(
        f"SELECT experience_id, task_id, group_id, reward::DOUBLE AS reward, {rule} AS w{extra}, "
        "temperature, coalesce(top_p, top_k, min_p) IS NOT NULL OR sampling IS NOT NULL AS is_cut "
        f"FROM {source} WHERE run_id = {literal(run_id)} AND purpose = 'train'{condition} "
        "ORDER BY experience_id"
    ).pl()


def _ratios(store: Store, rows: pl.DataFrame, target: str, *, is_side: bool) -> pl.Series:
    """Return exp(target - behavior) of each row, by the log-probs of its sampled tokens."""
    if not is_side and target not in PER_TOKEN:
        known = [name for name in PER_TOKEN if name.endswith("logprobs")]
        raise QueryError(
            f"`target` must be a column of log-probs of tokens{nearest(target, known)}, or a side "
            "column such as `derived:target_logprob`"
        )
    behavior = token_sums(store, rows)["logprob"]
    of_target = rows["target"] if is_side else token_sums(store, rows, target)["logprob"]
    return (of_target - behavior).exp().fill_nan(None)


def _estimated(
    rows: pl.DataFrame, run_id: str, *, target: str | None, rule: str | None, left_out: int
) -> OffPolicy:
    num_tasks = rows["task_id"].n_unique()
    if rule is not None:
        # one that samples until a row is kept has, in each task, the chances of the kept rows
        of_task = pl.col("w").mean().over("task_id")
        rows = rows.with_columns(w=pl.when(of_task > 0).then(pl.col("w") / of_task))
    kept = rows.filter(pl.col("w").is_not_null())
    # the rows of a task depend on each other, and few tasks make no sample of tasks
    clusters = kept["task_id"] if num_tasks >= MANY_TASKS else kept["group_id"]
    _, cluster = np.unique(clusters.to_numpy(), return_inverse=True)
    w, r = kept["w"].to_numpy(), kept["reward"].to_numpy()
    total, squares = float(w.sum()), float((w**2).sum())
    is_finite = math.isfinite(total) and math.isfinite(squares)
    effective = total**2 / squares if squares and is_finite else 0.0
    largest = float(w.max() / total) if total and is_finite else 1.0
    values = [_value("logged", r, cluster)] if len(r) else []
    refusal = _refusal(len(r), effective, largest)
    if refusal is None and rule is not None:
        values += [_value("self_normalized", _by_task(kept), cluster)]
    elif refusal is None:
        values += [
            _value("importance_sampling", w * r, cluster),
            _value("self_normalized", w * r, cluster, bottom=w),
            _value("doubly_robust", _robust(kept), cluster),
        ]
    return OffPolicy(
        run_id=run_id,
        target=target or str(rule),
        num_rows=len(r),
        num_left_out=left_out,
        num_tasks=num_tasks,
        num_without_support=num_tasks - kept["task_id"].n_unique(),
        effective_rows=effective,
        largest_share=largest,
        weight_mean=None if rule is not None else total / len(w),
        values=values,
        refusal=refusal,
        findings=_findings(kept, values, cluster, w, is_rule=rule is not None),
    )


def _by_task(rows: pl.DataFrame) -> np.ndarray:
    """Return rows whose mean is that of the tasks' weighted means, and varies as it does."""
    value = (pl.col("w") * pl.col("reward")).mean().over("task_id")
    return rows.select(value + pl.col("w") * (pl.col("reward") - value)).to_series().to_numpy()


def _robust(rows: pl.DataFrame) -> np.ndarray:
    """Return the doubly robust value of each row: m + w (r - m), m of the task's other rows.

    The row itself is left out of m: with it, the error of m and the weight would depend on each
    other, and the estimate be biased.
    """
    r, n = pl.col("reward"), pl.len().over("task_id")
    total = pl.len()
    others = (r.sum().over("task_id") - r) / (n - 1)
    everything = (r.sum() - r) / pl.max_horizontal(total - 1, pl.lit(1))
    m = pl.when(n > 1).then(others).otherwise(everything)
    return rows.select(m + pl.col("w") * (r - m)).to_series().to_numpy()


def _value(
    name: str, top: np.ndarray, cluster: np.ndarray, *, bottom: np.ndarray | None = None
) -> Value:
    """Return Σ top / Σ bottom over rows (of 1 by default) with its bootstrap-t interval.

    Clusters are resampled with replacement, and each resample is studentized by its own error:
    means of importance weights are skewed, and normal intervals cover the truth too seldom.
    """
    bottom = np.ones_like(top) if bottom is None else bottom
    tops, bottoms = np.bincount(cluster, top), np.bincount(cluster, bottom)
    value, error = _ratio(tops[None], bottoms[None])
    rng, many = np.random.default_rng(SEED), len(tops)
    found = []
    for first in range(0, RESAMPLES, size := max(1, _CELLS // many)):
        query_scope.check()
        drawn = rng.integers(many, size=(min(size, RESAMPLES - first), many))
        values, errors = _ratio(tops[drawn], bottoms[drawn])
        # a resample of equal clusters has no error to divide by
        found.append((values - value)[errors > 0] / errors[errors > 0])
    far = np.quantile(np.concatenate(found), _ENDS) if error[0] else np.zeros(2)
    low, high = value[0] - far[::-1] * error[0]
    return Value(name=name, value=float(value[0]), low=float(low), high=float(high))


def _ratio(tops: np.ndarray, bottoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ratios of sums over clusters, a row a resample, and their linearized errors."""
    many, total = tops.shape[1], np.maximum(bottoms.sum(1), 1e-300)
    value = tops.sum(1) / total
    squares = ((tops - value[:, None] * bottoms) ** 2).sum(1)
    return value, np.sqrt(squares * many / max(many - 1, 1)) / total


def _refusal(num_rows: int, effective: float, largest: float) -> str | None:
    if effective >= LEAST_ESS and largest <= LARGEST_SHARE:
        return None
    return (
        f"{num_rows:,} rows are worth {effective:.1f} at these weights (at least {LEAST_ESS:.0f} "
        f"are needed), and one row has {share(largest)} of all weight (at most "
        f"{share(LARGEST_SHARE)}): the target is too far from the policy that was logged; take one "
        "that is nearer, rows of later versions (`where`), or sample"
    )


def _findings(
    rows: pl.DataFrame, values: list[Value], cluster: np.ndarray, w: np.ndarray, *, is_rule: bool
) -> list[str]:
    found: list[str] = []
    if len(values) > 1:
        logged, best = values[0], values[-1]
        apart = best.low > logged.value or best.high < logged.value
        way = "more" if best.value > logged.value else "less"
        found.append(
            f"it would have earned {best.value:.3f} (95 %: {best.low:.3f} to {best.high:.3f}), "
            + (
                f"{way} than the {logged.value:.3f} that were logged"
                if apart
                else f"which does not differ from the {logged.value:.3f} that were logged"
            )
        )
    if not is_rule and len(w) and np.isfinite(w).all():
        mean, error = (
            x[0] for x in _ratio(*(np.bincount(cluster, x)[None] for x in (w, w * 0 + 1)))
        )
        if error and abs(mean - 1) > max(4 * error, LEAST_OFF):
            found.append(
                f"the weights have a mean of {mean:.2f} and not 1: the target's log-probs "
                "are of other tokens or another temperature, or of a truncated distribution"
            )
        cut = rows["is_cut"].mean()
        if cut:
            found.append(
                f"{share(float(cut))} of the rows were sampled by other rules than their log-probs "  # type: ignore[arg-type]
                "say (top_p, top_k, min_p, penalties), so that estimates are biased"
            )
    return found
