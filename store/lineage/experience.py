"""Influence: where an experience came from, and the steps and policies that it went into."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import NotFoundError
from ..query import literal
from ..store import Store
from .pipeline_runs import Asked, Row, maker

_LIGHT = (
    "experience_id, run_id, task_id, group_id, rollout, step, parent_id, source, policy_version, "
    "segments, num_tokens, tokenizer, reward, rewards, drop_reason, created_at"
)
_RELATIVE = "experience_id, source, run_id, policy_version, reward"
_CHILDREN = 20


@dataclass(frozen=True)
class ExperienceLineage:
    """Where an experience came from, and what became of it."""

    experience_id: str
    experience: Row
    """Its row, payload left out."""
    task: Row | None
    parents: list[Row]
    """The experiences it was made from, nearest first."""
    children: list[Row]
    """Experiences made from it, the first ones."""
    pipeline: Row | None
    """The pipeline run or import that stored it; None when an explorer did."""
    draws: list[Row]
    """Every draw; `counts` is false for those of superseded attempts."""
    policies: list[Row]
    """Of each run: the published versions trained on it, from the first one on."""
    preferences: list[Row]
    scores: list[Row]
    feedback: list[Row]
    derived: list[Row]
    drops: list[Row]
    sql: str
    """The SELECT of all policies that it influenced."""


def of_experience(store: Store, experience_id: str) -> ExperienceLineage:
    """Return where an experience came from, and the steps and policies that it influenced.

    Raises NotFoundError, with the nearest id, when it is not stored.
    """
    ask = Asked(store)
    key = literal(experience_id)
    found = ask(f"SELECT {_LIGHT} FROM experiences WHERE experience_id = {key}")
    if not found:
        raise _no_experience(store, ask, experience_id)
    task = "SELECT task_id, taskset, split, prompt_text, answer FROM tasks WHERE task_id = "
    mine = f"WHERE experience_id = {key}"
    return ExperienceLineage(
        experience_id=experience_id,
        experience=found[0],
        task=next(iter(ask(task + literal(found[0]["task_id"]))), None),
        parents=list(_ancestors(ask, found[0])),
        children=ask(
            f"SELECT {_RELATIVE} FROM experiences WHERE parent_id = {key} "
            f"ORDER BY experience_id LIMIT {_CHILDREN}"
        ),
        pipeline=maker(ask, experience_id),
        draws=ask(
            "SELECT d.run_id, d.attempt, d.step, d.position, d.weight, d.lag, d.source, "
            "d.sampler, d.batch_digest, s.step IS NULL OR d.step < s.step AS counts "
            "FROM draws d LEFT JOIN superseded_steps s USING (run_id, attempt) "
            f"{mine} ORDER BY d.run_id, d.step, d.attempt"
        ),
        policies=ask(_influenced(key)),
        preferences=ask(
            "SELECT preference_id, chosen_id, rejected_id, margin, source FROM preferences "
            f"WHERE {key} IN (chosen_id, rejected_id) ORDER BY preference_id"
        ),
        scores=ask(
            f"SELECT * EXCLUDE (experience_id, digest) FROM scores {mine} ORDER BY created_at"
        ),
        feedback=ask(
            f"SELECT * EXCLUDE (experience_id, digest) FROM feedback {mine} ORDER BY created_at"
        ),
        derived=ask(
            f"SELECT * EXCLUDE experience_id FROM experience_values {mine} ORDER BY created_at"
        ),
        drops=ask(
            "SELECT p.pipeline, d.operator, d.reason, d.lineage_id, d.created_at "
            f"FROM drops d LEFT JOIN lineage p USING (lineage_id) {mine} ORDER BY d.created_at"
        ),
        sql=(
            "SELECT p.* FROM policies_current p JOIN (SELECT run_id, min(step) AS step "
            f"FROM draws_current {mine} GROUP BY run_id) d USING (run_id) "
            "WHERE p.policy_version >= d.step ORDER BY run_id, policy_version"
        ),
    )


def _no_experience(store: Store, ask: Asked, experience_id: str) -> NotFoundError:
    distance = f"levenshtein(experience_id, {literal(experience_id)})"
    close = ask(
        f"SELECT experience_id FROM experiences WHERE {distance} <= {len(experience_id) // 2} "
        f"ORDER BY {distance} LIMIT 1"
    )
    hint = f"; did you mean `{close[0]['experience_id']}`?" if close else ""
    return NotFoundError(
        forgotten(store, experience_id) or f"there is no experience `{experience_id}`{hint}"
    )


def forgotten(store: Store, experience_id: str) -> str | None:
    """Say by which retention rule an experience was deleted, None when by none."""
    found = store.sql(
        "SELECT reason, created_at FROM drops WHERE operator = 'retention' "
        f"AND experience_id = {literal(experience_id)} LIMIT 1"
    ).fetchall()
    for reason, when in found:
        return (
            f"experience `{experience_id}` was deleted {when:%Y-%m-%d %H:%M} by retention rule "
            f"{reason}; a snapshot of before still shows it, with `--at`"
        )
    return None


def _ancestors(ask: Asked, row: Row) -> Iterator[Row]:
    seen = {row["experience_id"]}
    while row["parent_id"] is not None and row["parent_id"] not in seen:
        seen.add(row["parent_id"])
        found = ask(
            f"SELECT {_RELATIVE}, parent_id FROM experiences "
            f"WHERE experience_id = {literal(row['parent_id'])}"
        )
        if not found:
            return
        [row] = found
        yield row


def _influenced(key: str) -> str:
    return (
        "SELECT d.run_id, d.step AS first_step, min(p.policy_version) AS first_version, "
        "max(p.policy_version) AS last_version, count(p.policy_version) AS num_versions FROM "
        "(SELECT run_id, min(step) AS step FROM draws_current "
        f"WHERE experience_id = {key} GROUP BY run_id) d "
        "LEFT JOIN policies_current p ON p.run_id = d.run_id AND p.policy_version >= d.step "
        "GROUP BY d.run_id, d.step ORDER BY d.run_id"
    )
