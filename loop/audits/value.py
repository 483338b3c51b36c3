"""Which rows moved the policy most, and what runs without a source came to.

The push of a row is a proxy of its gradient: credit times doubt, from what is stored. It does not
see what the loss clips, nor whether a push was of use; runs without a source are compared for that.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from ...store import Store
from ...store.errors import JobError
from ...store.query import literal
from .clustered import ALPHA, Z, by_bin, p_value
from .history import named, of_run, share
from .token_sums import token_sums

DIMENSIONS = ("taskset", "source", "engine", "lag", "epoch")
"""What the push is split by. Not by length: a longer row has more tokens to push."""
LEAST_RATIO = 2.0
"""A kind of rows whose mean push is less than so many times that of others is not a finding."""
LEAST_SHARE = 0.01
"""A source with fewer of the draws does not count as trained on."""
LEAST_TASKS = 5
"""Runs are compared on at least so many tasks."""
SHOWN = 20
_KEYS = 6


@dataclass(frozen=True, kw_only=True)
class DataValue:
    """Which rows moved a run's policy most, and how runs without some of them compare."""

    run_id: str
    num_draws: int
    """Draws that trained a row whose push is known."""
    num_unknown: int
    """Draws of rows without log-probs of their sampled tokens."""
    top: list[dict[str, Any]]
    """Draws with the largest push: step, credit, surprise (mean negative log-prob of a sampled
    token, in nats) and share of the whole push."""
    bins: list[dict[str, Any]]
    """A row a bin of a dimension: its share of the draws and of the push, and mean pushes with the
    95 % interval and p, the rows of a group as one cluster."""
    comparisons: list[dict[str, Any]]
    """A row another run: what only one of both was trained on, and the difference of rewards."""
    findings: list[str]
    facts: list[str]


def value(store: Store, run_id: str, *, against: Sequence[str] = ()) -> DataValue:
    """Rank the draws of a run by how much they moved its policy, and compare other runs with it.

    The push of a draw is |weight x advantage| (1 without an advantage, as in imitation) times the
    sum over its sampled tokens of 1 - p, with the stored log-probs. A kind of rows is a finding
    when its mean push is at least twice that of other rows with p < 0.001 after Bonferroni's
    correction. `against` names runs that leave out a source; their rewards are compared task by
    task, on the newest evaluation of one version of both, else on the last quarter of the rows that
    they sampled.

    Raises NotFoundError for an unknown run, JobError for one without steps or log-probs.
    """
    now = of_run(store, run_id)
    others = [(name, of_run(now, name)) for name in against]
    rows = _draws(now, run_id)
    sums = token_sums(now, rows)
    rows = rows.with_columns(
        surprise=-sums["logprob"] / sums["tokens"], push=pl.col("credit") * sums["doubt"]
    )
    known = rows.filter(pl.col("push").is_not_null())
    if not known.height:
        raise JobError(
            f"no row that run `{run_id}` was trained on has `logprobs` of sampled tokens, by which "
            "its push is known; rows of text and of experts have none"
        )
    bins, findings = _split(known)
    comparisons = [_compared(now, run_id, name) for name, _ in others]
    return DataValue(
        run_id=run_id,
        num_draws=known.height,
        num_unknown=rows.height - known.height,
        top=_top(known),
        bins=bins,
        comparisons=comparisons,
        findings=[*findings, *_told(run_id, comparisons)],
        facts=_facts(now, run_id, known),
    )


def _draws(store: Store, run_id: str) -> pl.DataFrame:
    found = store.sql(
        f"""
        SELECT experience_id, step, group_id, task_id, taskset, source, engine, lag, epoch, reward,
               advantage, abs(weight * coalesce(advantage, 1.0)) AS credit
        FROM trained_rows WHERE run_id = {literal(run_id)} ORDER BY step, position
        """
    ).pl()
    return found.with_columns(named(column) for column in DIMENSIONS)


def _top(rows: pl.DataFrame) -> list[dict[str, Any]]:
    whole = rows["push"].sum()
    columns = ("experience_id", "step", "taskset", "source", "reward", "advantage", "surprise")
    top = rows.sort("push", "step", "experience_id", descending=[True, False, False]).head(SHOWN)
    part = pl.col("push") / whole if whole else pl.lit(0.0)
    return top.select(*columns, share=part).to_dicts()


def _split(rows: pl.DataFrame) -> tuple[list[dict[str, Any]], list[str]]:
    tests = [
        (dimension, by_bin(rows, dimension, "push", cluster="group_id"))
        for dimension in DIMENSIONS
        if rows[dimension].n_unique() > 1
    ]
    number, whole = sum(found.height for _, found in tests), float(rows["push"].sum())
    bins = [
        {
            "dimension": dimension,
            "bin": row[dimension],
            "draws": row["num_rows"] / rows.height,
            "push": row["mean"] * row["num_rows"] / whole if whole else 0.0,
            "mean": row["mean"],
            "low": row["low"],
            "high": row["high"],
            "rest": row["rest"],
            "p": min(1.0, p_value(row["z"]) * number),
        }
        for dimension, found in tests
        for row in found.iter_rows(named=True)
    ]
    findings = [
        f"{row['dimension']} {row['bin']}: {share(row['draws'])} of the draws and "
        f"{share(row['push'])} of the push, {row['mean'] / row['rest']:.1f} times that of another "
        "row"
        for row in bins
        if row["p"] < ALPHA and row["rest"] and row["mean"] >= LEAST_RATIO * row["rest"]
    ]
    return bins, findings


def _facts(store: Store, run_id: str, rows: pl.DataFrame) -> list[str]:
    whole = float(rows["push"].sum())
    few = max(1, rows.height // 100)
    made = [f"{share(float((rows['push'] == 0).mean()))} of the draws pushed nothing"]  # type: ignore[arg-type]
    if whole:
        largest = float(rows["push"].top_k(few).sum()) / whole
        made.append(f"the {few:,} draws with the largest push have {share(largest)} of all of it")
    norms = store.sql(
        f"SELECT step, value FROM metrics_current WHERE run_id = {literal(run_id)} AND "
        "job = 'train' AND name = 'train/grad_norm' AND value IS NOT NULL"
    ).pl()
    steps = rows.group_by("step").agg(push=pl.col("push").mean()).join(norms, on="step")
    if steps.height >= 10:
        ranks = steps.select(pl.corr("push", "value", method="spearman")).item()
        if ranks is not None and math.isfinite(ranks):
            made.append(
                f"over {steps.height} steps, the mean push and the trainer's `train/grad_norm` "
                f"have a rank correlation of {ranks:+.2f}"
            )
    return made


def _compared(store: Store, run_id: str, other: str) -> dict[str, Any]:
    """Compare what two runs were trained on, and what they earn on tasks that both tried."""
    sides = [set(_sources(store, name)) for name in (run_id, other)]
    # of tasks, not rows: runs try different tasks different times
    rewards = _rewards(store, run_id, other)
    row: dict[str, Any] = {
        "run": other,
        "without": sorted(sides[0] - sides[1]),
        "more": sorted(sides[1] - sides[0]),
        "tasks": rewards.height,
        "difference": None,
        "low": None,
        "high": None,
        "p": None,
        "also_differ": list(_differing(_config(store, run_id), _config(store, other)))[:_KEYS],
    }
    if rewards.height < LEAST_TASKS:
        return row
    gaps = (rewards["other"] - rewards["own"]).to_numpy()
    mean, error = float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))
    bounds = {"low": mean - Z * error, "high": mean + Z * error}
    return row | {"difference": mean, **bounds, "p": p_value(mean / error) if error else None}


def _sources(store: Store, run_id: str) -> list[str]:
    """Return the tasksets and sources of rows of which at least 1 % of the draws are."""
    drawn = f"draws_current WHERE run_id = {literal(run_id)}"
    kinds = {"taskset": "t.taskset", "source": "e.source", "mixture": "d.source"}
    parts = [
        f"SELECT '{kind} ' || {column} AS name FROM (SELECT * FROM {drawn}) d "
        "JOIN experiences e USING (experience_id) LEFT JOIN tasks t ON e.task_id = t.task_id "
        f"WHERE {column} IS NOT NULL GROUP BY ALL HAVING count(*) >= "
        f"{LEAST_SHARE} * (SELECT count(*) FROM {drawn})"
        for kind, column in kinds.items()
    ]
    return [name for (name,) in store.sql(" UNION ALL ".join(parts)).fetchall()]


def _rewards(store: Store, run_id: str, other: str) -> pl.DataFrame:
    """Return the mean reward of both runs on each task that both tried: (task_id, own, other)."""
    runs = f"(VALUES ({literal(run_id)}, true), ({literal(other)}, false)) AS r(name, is_own)"
    return store.sql(
        f"""
        WITH evals AS (
            SELECT r.is_own, e.task_id, e.reward, e.policy_version AS version
            FROM experiences_current e JOIN {runs} ON starts_with(e.run_id, r.name || ':eval-')
            WHERE e.reward IS NOT NULL),
        newest AS (
            SELECT max(version) AS version FROM (
                SELECT version FROM evals GROUP BY version HAVING count(DISTINCT is_own) = 2)),
        late AS (
            SELECT r.is_own, e.task_id, e.reward,
                   percent_rank() OVER (PARTITION BY r.is_own ORDER BY e.batch) AS place
            FROM experiences_current e JOIN {runs} ON e.run_id = r.name
            WHERE e.purpose = 'train' AND e.reward IS NOT NULL),
        chosen AS (
            SELECT evals.is_own, task_id, reward FROM evals JOIN newest USING (version)
            UNION ALL
            SELECT is_own, task_id, reward FROM late
            WHERE place >= 0.75 AND (SELECT version FROM newest) IS NULL)
        SELECT task_id, avg(reward) FILTER (is_own) AS own, avg(reward) FILTER (NOT is_own) AS other
        FROM chosen GROUP BY task_id HAVING own IS NOT NULL AND other IS NOT NULL ORDER BY task_id
        """
    ).pl()


def _config(store: Store, run_id: str) -> Any:
    found = store.sql(
        f"SELECT arg_max(config, created_at) FROM job_events WHERE run_id = {literal(run_id)} "
        "AND job = 'train'"
    ).fetchall()[0][0]
    return json.loads(found) if found else {}


def _differing(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the keys in which two configurations differ, except their names."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        if one != other and path not in ("name", "store", "output"):
            yield path
        return
    for key in sorted({*one, *other}):
        yield from _differing(one.get(key), other.get(key), f"{path}{path and '.'}{key}")


def _told(run_id: str, comparisons: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in comparisons:
        p = row["p"]
        if row["difference"] is None or p is None or p * len(comparisons) >= ALPHA:
            continue
        way = "higher" if row["difference"] > 0 else "lower"
        what = " and ".join(row["without"]) or "nothing less"
        also = (
            f"; they also differ in {', '.join(row['also_differ'])}" if row["also_differ"] else ""
        )
        yield (
            f"without {what}, run `{row['run']}` is {abs(row['difference']):.3f} {way} than "
            f"`{run_id}` on {row['tasks']} tasks of both (95 %: {row['low']:+.3f} to "
            f"{row['high']:+.3f}){also}"
        )
