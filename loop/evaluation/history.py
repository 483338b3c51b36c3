"""Stored evaluations: the scores of each task, and earlier evaluations that can be reused."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from ...store import Store
from ...store.ids import content_id
from ...store.query import literal
from ..runs.job import Job, functions_of, stored_config
from ..weight_sync import PublishedWeights
from .policies import EvaluatedPolicy

_TASKS_OWN = "group_id = format('{}/{:06d}/{:04d}', run_id, batch, group_index)"
"""SQL condition on rows that are rollouts of the task itself, by their group's ID (`store.ids`)."""


@dataclass(frozen=True)
class RolloutScores:
    """The rewards of an evaluation's rollouts."""

    scores: dict[str, list[float]]
    """By task, the rewards that could be computed."""
    num_rows: int
    num_unscored: int
    """Rollouts whose reward could not be computed."""
    last_reason: str | None
    """Why the last of them has no reward, if it is known."""


def rollout_scores(store: Store, run_id: str) -> RolloutScores:
    """Return the scores of an evaluation; a rollout of several rows has its last row's reward.

    Rows of other groups, such as judgments, are not rollouts of a task.
    """
    rows = store.sql(
        "SELECT task_id, group_id, rollout_index, experience_id, reward, drop_reason, "
        f"{_TASKS_OWN} AS is_own FROM experiences WHERE run_id = {literal(run_id)}"
    ).pl()
    # Shorter IDs first: as text, the 11th row of a rollout (`.10`) would sort before the third.
    row_id = pl.col("experience_id")
    ordered = rows.filter("is_own").sort(
        "group_id", "rollout_index", row_id.str.len_bytes(), row_id
    )
    last = ordered.group_by("group_id", "rollout_index", maintain_order=True).last()
    by_task = last.group_by("task_id", maintain_order=True).agg(pl.col("reward").drop_nulls())
    reasons = last.filter(pl.col("reward").is_null())["drop_reason"].drop_nulls()
    return RolloutScores(
        scores=dict(by_task.iter_rows()),
        num_rows=rows.height,
        num_unscored=last["reward"].null_count(),
        last_reason=reasons[-1] if len(reasons) else None,
    )


def evaluated_before(job: Job, subject: EvaluatedPolicy, tasks: Sequence[str]) -> str | None:
    """Return the run_id of the newest earlier evaluation with the same settings, or None.

    Settings are the weights, tasks, number and sampling of rollouts, functions and auxiliary
    models. A failed evaluation does not count; one during the run counts if it covers all tasks. A
    model that is not a version of the run is always evaluated again.
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
    """Return the run_id of an evaluation's rows.

    >>> rows_id("demo", 3)
    'demo:eval-003'
    """
    return f"{run_id}:eval-{attempt:03d}"


def rows_id_during(job: Job, weights: PublishedWeights, tasks: Sequence[str]) -> str:
    """Return the run_id of the rows of an evaluation during the run.

    The same weights, settings and tasks give the same run_id.
    """
    terms = _settings(stored_config(job.config)), tasks, weights.digest
    which = content_id(*terms, length=8)
    return f"{job.run_id}:eval-{weights.version:06d}-{which}"


def _settings(config: str) -> dict[str, Any]:
    """Return the parts of a stored configuration that an evaluation depends on."""
    tree = json.loads(config)
    explorer, evaluate = tree.get("explorer") or {}, tree.get("evaluate") or {}
    mixture = (tree.get("tasks") or {}).get("mixture") or {}
    own = {name: _own(one) for name, one in {"": evaluate, **mixture}.items()}
    tasksets = evaluate.get("tasksets")
    if tasksets is not None:
        tasksets = {name: _rest(one) | _own(one) for name, one in tasksets.items()}
    # left out where nothing has its own: run_ids of evaluations are made of the settings
    return ({"own": own} if any(own.values()) else {}) | {
        "seed": tree["seed"],
        "model": {k: tree["model"].get(k) for k in ("dtype", "lora")},
        "explorer": {k: explorer.get(k) for k in ("workflow", "auxiliary_models", "rewards")},
        "engine": evaluate.get("engine") or explorer.get("engine"),
        "evaluate": {k: evaluate.get(k) for k in ("group_size", "sampling")}
        | {"tasksets": tasksets},
    }


_FUNCTIONS = ("workflow", "rewards")


def _own(section: Mapping[str, Any]) -> dict[str, Any]:
    return {k: section[k] for k in _FUNCTIONS if section.get(k) is not None}


def _rest(section: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in section.items() if k not in _FUNCTIONS}


def _is_of(store: Store, run_id: str, subject: EvaluatedPolicy, tasks: Collection[str]) -> bool:
    """Return whether an evaluation's rows are rollouts of these weights on all these tasks."""
    rows = store.sql(
        "SELECT DISTINCT task_id, policy_version, digests FROM experiences WHERE "
        f"run_id = {literal(run_id)} AND {_TASKS_OWN}"
    ).fetchall()
    digests = {digest for _, _, found in rows for digest in found or () if digest is not None}
    weights = subject.weights
    return (
        {task for task, _, _ in rows} == set(tasks)
        and {version for _, version, _ in rows} == {subject.version}
        and weights is not None
        and digests <= {weights.digest}
    )
