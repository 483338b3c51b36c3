"""Lineage of an experience: its origin, and the steps and policies that it influenced."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import NotFoundError
from ..query import literal
from ..search import nearest_id
from ..tables import Tables
from .pipeline_runs import Asked, Row, maker

_LIGHT = (
    "experience_id, run_id, task_id, group_id, rollout_index, batch, parent_id, source, "
    "policy_version, segments, num_tokens, tokenizer, reward, rewards, drop_reason, created_at"
)
_RELATIVE = "experience_id, source, run_id, policy_version, reward"
_CHILDREN = 20


@dataclass(frozen=True)
class ExperienceLineage:
    """The origin of an experience, and what it influenced."""

    experience_id: str
    experience: Row
    """Its row without texts and tokens."""
    task: Row | None
    parents: list[Row]
    """The experiences it was made from, nearest first."""
    children: list[Row]
    """Experiences made from it, the first ones."""
    pipeline: Row | None
    """The pipeline run or import that stored it; None when an explorer did."""
    draws: list[Row]
    """All draws; `counts` is false for those of superseded attempts."""
    policies: list[Row]
    """For each run, the range of published versions trained on it."""
    preferences: list[Row]
    scores: list[Row]
    feedback: list[Row]
    derived: list[Row]
    drops: list[Row]
    sql: str
    """A SELECT of all policies that it influenced."""


def of_experience(store: Tables, experience_id: str) -> ExperienceLineage:
    """Return the origin of an experience, and the steps and policies that it influenced.

    Raises NotFoundError, with the nearest id, when it is not stored.
    """
    ask = Asked(store)
    key = literal(experience_id)
    found = ask(f"SELECT {_LIGHT} FROM experiences WHERE experience_id = {key}")
    if not found:
        hint = nearest_id(store, "experiences", experience_id)
        raise NotFoundError(
            forgotten(store, experience_id) or f"no experience `{experience_id}`{hint}"
        )
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


def forgotten(store: Tables, experience_id: str) -> str | None:
    """Return which retention rule deleted an experience, or None."""
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
    # rows of other programs may be each other's parents
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
        # step s makes version s, so a row that it draws is part of that version and all later ones
        "LEFT JOIN policies_current p ON p.run_id = d.run_id AND p.policy_version >= d.step "
        "GROUP BY d.run_id, d.step ORDER BY d.run_id"
    )
