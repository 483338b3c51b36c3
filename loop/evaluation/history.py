"""Measurements as rows: the scores of each task, and what was measured in the same way before."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from ...store import Store
from ...store.ids import content_id
from ...store.query import literal
from ..runs.job import Job, functions_of, stored_config
from ..weight_sync import PublishedWeights
from .policies import EvaluatedPolicy

_TASKS_OWN = r"/\d{6,}/\d{4,}$"
"""How the ids of groups end whose rows are tries at the task itself (`store.ids`)."""


@dataclass(frozen=True)
class RolloutScores:
    """What the tries of a measurement came to."""

    scores: dict[str, list[float]]
    """Of each task the rewards of its tries, as far as they could be computed."""
    num_rows: int
    num_unscored: int
    """Tries whose reward could not be computed."""
    last_reason: str | None
    """Why, of the last of them, if it says so."""


def tries(store: Store, run_id: str) -> RolloutScores:
    """Return the tries of a measurement; one of several rows has the reward of its last row.

    Rows that stand apart, as judgements do, are no tries.
    """
    rows = store.sql(
        "SELECT task_id, group_id, rollout, experience_id, reward, drop_reason FROM experiences "
        f"WHERE run_id = {literal(run_id)}"
    ).pl()
    number = pl.col("experience_id").str.extract(r"/\d+\.(\d+)$").cast(pl.Int64).fill_null(0)
    ordered = rows.filter(pl.col("group_id").str.contains(_TASKS_OWN)).sort(
        "group_id", "rollout", number
    )
    last = ordered.group_by("group_id", "rollout", maintain_order=True).last()
    by_task = last.group_by("task_id", maintain_order=True).agg(pl.col("reward").drop_nulls())
    reasons = last.filter(pl.col("reward").is_null())["drop_reason"].drop_nulls()
    return RolloutScores(
        scores=dict(by_task.iter_rows()),
        num_rows=rows.height,
        num_unscored=last["reward"].null_count(),
        last_reason=reasons[-1] if len(reasons) else None,
    )


def measured_before(job: Job, subject: EvaluatedPolicy, tasks: Sequence[str]) -> str | None:
    """Return the run_id of the rows of the newest measurement of a version that was the same.

    The same weights, tasks, number and kind of tries, functions and other models; one that did not
    end well is none, and those made while the run went on count where all tasks were tried. What is
    no version of the run is always measured again.
    """
    if subject.weights is None:
        return None
    rows = job.store.sql(
        "SELECT attempt, config, functions, status FROM job_events WHERE job = 'evaluate' "
        f"AND run_id = {literal(job.run_id)} ORDER BY attempt DESC"
    ).fetchall()
    wanted = _settings(stored_config(job.config)), functions_of(job)
    alike = [
        (attempt, status)
        for attempt, config, functions, status in rows
        if (_settings(config), functions) == wanted
    ]
    ids = [rows_id(job.run_id, attempt) for attempt, status in alike if status == "done"]
    if alike:
        ids.append(rows_id_during(job, subject.weights, tasks))
    return next((one for one in ids if _is_of(job.store, one, subject, tasks)), None)


def rows_id(run_id: str, attempt: int) -> str:
    """Return the run_id of the rows of a measurement.

    >>> rows_id("demo", 3)
    'demo:eval-003'
    """
    return f"{run_id}:eval-{attempt:03d}"


def rows_id_during(job: Job, weights: PublishedWeights, tasks: Sequence[str]) -> str:
    """Return the run_id of the rows of a measurement that is made while the run goes on.

    The same weights, measured in the same way on the same tasks, have the same.
    """
    terms = _settings(stored_config(job.config)), tasks, weights.digest
    which = content_id(*terms, length=8)
    return f"{job.run_id}:eval-{weights.version:06d}-{which}"


def _settings(config: str) -> dict[str, Any]:
    """Return what of a stored configuration decides how a policy is measured."""
    tree = json.loads(config)
    explorer, evaluate = tree.get("explorer") or {}, tree.get("evaluate") or {}
    return {
        "seed": tree["seed"],
        "model": {k: tree["model"].get(k) for k in ("dtype", "lora")},
        "explorer": {k: explorer.get(k) for k in ("workflow", "auxiliary_models", "rewards")},
        "engine": evaluate.get("engine") or explorer.get("engine"),
        "evaluate": {k: evaluate.get(k) for k in ("group_size", "sampling", "tasksets")},
    }


def _is_of(store: Store, run_id: str, subject: EvaluatedPolicy, tasks: Collection[str]) -> bool:
    """Tell whether the rows of a measurement are tries of these weights at these tasks."""
    rows = store.sql(
        "SELECT DISTINCT task_id, policy_version, digests FROM experiences WHERE "
        f"run_id = {literal(run_id)} AND regexp_matches(group_id, '{_TASKS_OWN}')"
    ).fetchall()
    digests = {digest for _, _, found in rows for digest in found or () if digest is not None}
    weights = subject.weights
    return (
        {task for task, _, _ in rows} == set(tasks)
        and {version for _, version, _ in rows} == {subject.version}
        and weights is not None
        and digests <= {weights.digest}
    )
