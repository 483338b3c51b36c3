"""Lineage: what made a policy, down to the rows; `influence` goes the other way."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import snapshots
from ..errors import NotFoundError, nearest
from ..ids import combine
from ..query import is_in, literal
from ..side_columns import SideColumn, parse
from ..tables import Tables
from .experience import ExperienceLineage, of_experience
from .pipeline_runs import Asked, Row, named

__all__ = ["ExperienceLineage", "PolicyLineage", "of_experience", "of_policy"]


@dataclass(frozen=True)
class PolicyLineage:
    """What made the weights of a version: everything that counts, superseded attempts left out."""

    run_id: str
    policy_version: int
    weights: Row
    """The row of `policies`."""
    parents: list[int]
    """Versions of the run that it was trained from, nearest first."""
    begun_from: str | None
    """Weights of another run that the first of them are, as `RUN:VERSION`."""
    attempts: list[Row]
    """Which attempt took which steps."""
    rows: Row
    """Draws of all these steps, in numbers: experiences, groups, reward, lag."""
    sources: list[Row]
    """Where the experiences came from, and which versions of which run wrote them."""
    pipelines: list[Row]
    """Pipeline runs that made, derived a value of, or left out some of the experiences."""
    functions: list[Row]
    """Workflows and rewards of the runs that made the rows, by the digests of their sources."""
    side_columns: list[Row]
    """Side columns that the run was trained with, and the versions that its rows have of them."""
    tokenizers: list[str]
    """Digests of tokenizers that made tokens out of text, when drawn or imported."""
    snapshots: list[Row]
    """Snapshots that the run pinned or was configured to read."""
    batches: list[Row]
    """Each step's digest of its rows in their order, and the table versions it was drawn from."""
    batches_digest: str | None
    """Digest of all of these; None when a step has none."""
    code_versions: list[str]
    config: Row
    sql: str
    """The SELECT of all draws with their rows, in the order of training."""


def of_policy(store: Tables, run_id: str | None, policy_version: int) -> PolicyLineage:
    """Return what made a published version of a run's weights; None is the only run there is.

    Raises NotFoundError, with what there is, for a run or version without weights.
    """
    ask = Asked(store)
    run_id = _run(ask, run_id)
    published = {
        row["policy_version"]: row
        for row in ask(f"SELECT * FROM policies_current WHERE run_id = {literal(run_id)}")
    }
    if policy_version not in published:
        raise _no_version(run_id, policy_version, published)
    # Step s makes version s: the steps up to a version are those that made it.
    drawn = (
        f"SELECT * FROM draws_current WHERE run_id = {literal(run_id)} AND step <= {policy_version}"
    )
    ids = f"SELECT DISTINCT experience_id FROM ({drawn})"
    jobs = ask(
        f"SELECT * FROM job_events WHERE run_id = {literal(run_id)} AND job <> 'evaluate' "
        "ORDER BY created_at"
    )
    config = json.loads(jobs[-1]["config"]) if jobs else {}
    sources = _sources(ask, drawn)
    batches = ask(
        "SELECT step, any_value(batch_digest) AS batch_digest, any_value(drawn_from) AS drawn_from "
        f"FROM ({drawn}) GROUP BY step ORDER BY step"
    )
    digests = [b["batch_digest"] for b in batches]
    parents = _parents(published, policy_version)
    first = published.get([policy_version, *parents][-1], {})
    origin = first.get("parent_run_id")
    return PolicyLineage(
        run_id=run_id,
        policy_version=policy_version,
        weights=published[policy_version],
        parents=parents,
        begun_from=origin and f"{origin}:{first['parent_version']}",
        attempts=ask(
            "SELECT attempt, min(step) AS first_step, max(step) AS last_step, count(*) AS num_rows "
            f"FROM ({drawn}) GROUP BY attempt ORDER BY first_step"
        ),
        rows=_in_numbers(ask, drawn),
        sources=sources,
        pipelines=_pipelines(ask, ids),
        functions=_functions(ask, {run_id, *(s["run_id"] for s in sources)}),
        side_columns=[_used(ask, c, ids) for c in _side_columns(config)],
        tokenizers=_tokenizers(ask, drawn),
        snapshots=_snapshots(store, run_id, config),
        batches=batches,
        batches_digest=combine(digests) if digests and None not in digests else None,
        code_versions=sorted({job["code_version"] for job in jobs}),
        config=config,
        sql=(
            "SELECT d.step, d.position, d.lag, d.weight, d.preference_id, e.* "
            "FROM draws_current d "
            f"JOIN experiences e USING (experience_id) WHERE d.run_id = {literal(run_id)} "
            f"AND d.step <= {policy_version} ORDER BY d.step, d.position"
        ),
    )


def _run(ask: Asked, run_id: str | None) -> str:
    known = [row["run_id"] for row in ask("SELECT DISTINCT run_id FROM policies ORDER BY run_id")]
    if run_id is None and len(known) == 1:
        return known[0]
    if run_id is None:
        message = "; say which run's: `RUN:VERSION`" + nearest("", known) if known else ""
        raise NotFoundError(f"{len(known) or 'no'} runs have published weights{message}")
    if run_id not in known:
        raise NotFoundError(f"no run `{run_id}` has published weights{nearest(run_id, known)}")
    return run_id


def _no_version(run_id: str, wanted: int, published: Mapping[int, Row]) -> NotFoundError:
    close = sorted(published, key=lambda v: (abs(v - wanted), v))[:3]
    message = ", ".join(f"`{v}`" for v in close) or "none"
    return NotFoundError(
        f"run `{run_id}` has no weights of version {wanted} that count; the nearest are {message}"
    )


def _parents(published: Mapping[int, Row], version: int) -> list[int]:
    chain: list[int] = []
    # the weights of another run are not a parent here, but what this run began from
    while version in published and not published[version].get("parent_run_id"):
        parent = published[version]["parent_version"]
        if parent is None or parent in chain:
            break
        chain.append(parent)
        version = parent
    return chain


def _in_numbers(ask: Asked, drawn: str) -> Row:
    # As it was when drawn: a side column may have replaced the stored reward. Draws are joined from
    # the left, since rows that a retention rule deleted were trained on too.
    reward = "as_drawn(d.replaced, 'reward', e.reward)"
    [row] = ask(
        "SELECT count(*) AS num_rows, count(DISTINCT d.experience_id) AS num_experiences, "
        "count(DISTINCT e.group_id) AS num_groups, "
        "count(*) FILTER (e.experience_id IS NULL) AS num_gone, "
        "count(*) FILTER (d.weight = 0) AS num_weightless, "
        f"avg({reward}) AS reward_mean, min({reward}) AS reward_min, "
        f"max({reward}) AS reward_max, "
        f"count(*) FILTER ({reward} IS NULL) AS num_unscored, avg(d.lag) AS lag_mean, "
        "max(d.lag) AS lag_max, sum(e.num_tokens)::BIGINT AS num_tokens "
        f"FROM ({drawn}) d LEFT JOIN experiences e USING (experience_id)"
    )
    return row


def _sources(ask: Asked, drawn: str) -> list[Row]:
    return ask(
        "SELECT e.source, e.run_id, d.source AS drawn_as, count(*) AS num_rows, "
        "count(DISTINCT d.experience_id) AS num_experiences, "
        "min(e.policy_version) AS policy_version_min, max(e.policy_version) AS policy_version_max "
        f"FROM ({drawn}) d LEFT JOIN experiences e USING (experience_id) "
        "GROUP BY ALL ORDER BY num_rows DESC, e.source, e.run_id, d.source"
    )


def _pipelines(ask: Asked, ids: str) -> list[Row]:
    """Return pipeline runs with what they did to these experiences, and to how many."""
    touched = ask(
        f"WITH ids AS ({ids}), made AS (SELECT experience_id, lineage_id "
        "FROM experiences SEMI JOIN lineage USING (lineage_id)), touched AS ("
        "SELECT lineage_id, 'made' AS did, count(*) AS num_experiences "
        "FROM made JOIN ids USING (experience_id) GROUP BY ALL UNION ALL "
        "SELECT lineage_id, 'derived ' || name, count(*) "
        "FROM experience_values JOIN ids USING (experience_id) "
        "WHERE lineage_id IS NOT NULL GROUP BY ALL "
        "UNION ALL SELECT lineage_id, 'left out', count(*) "
        "FROM drops JOIN ids USING (experience_id) GROUP BY ALL) "
        "SELECT did, num_experiences, lineage_id, p.pipeline, p.source, p.operators "
        "FROM touched LEFT JOIN lineage p USING (lineage_id) ORDER BY lineage_id, did"
    )
    return [row | {"operators": named(row["operators"])} for row in touched]


def _functions(ask: Asked, run_ids: Iterable[str | None]) -> list[Row]:
    """Return each function by which explorers made rows, with the attempts that used it so."""
    by_run = is_in("run_id", (run_id for run_id in run_ids if run_id is not None))
    return ask(
        "SELECT f.name, f.value AS digest, run_id, list(DISTINCT attempt ORDER BY attempt) "
        "AS attempts FROM (SELECT run_id, attempt, unnest(functions) AS f FROM job_events "
        f"WHERE job = 'explore' AND {by_run}) "
        "GROUP BY ALL ORDER BY run_id, f.name DESC, attempts"
    )


def _side_columns(config: Mapping[str, Any]) -> list[tuple[str, SideColumn]]:
    """Return the side columns that a run's trainer reads, as the configuration writes them."""
    trainer, sources = _sampled(config)
    specs = [spec for one in (trainer, *sources) for spec in one.get("side_columns", ())]
    return [(spec, parse(spec)) for spec in dict.fromkeys(specs)]


def _sampled(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Iterable[Mapping[str, Any]]]:
    """Return the trainer's section of a configuration, and the sources that it mixes."""
    trainer = config.get("trainer") or {}
    return trainer, ((trainer.get("sampler") or {}).get("mixed") or {}).values()


def _used(ask: Asked, named: tuple[str, SideColumn], ids: str) -> Row:
    spec, column = named
    wanted = " AND ".join(f"{k} = {literal(v)}" for k, v in column.filters) or "true"
    by = "annotator" if column.table == "feedback" else column.tie
    versions = ask(
        f"SELECT {by} AS version, count(*) AS num_experiences FROM {column.table} "
        f"WHERE {wanted} AND experience_id IN ({ids}) GROUP BY ALL "
        "ORDER BY num_experiences DESC, version"
    )
    return {"spec": spec, "table": column.table, "versions": versions}


def _tokenizers(ask: Asked, drawn: str) -> list[str]:
    found = ask(
        f"SELECT DISTINCT coalesce(d.tokenizer, e.tokenizer) AS tokenizer FROM ({drawn}) d "
        "LEFT JOIN experiences e USING (experience_id) ORDER BY 1"
    )
    return [row["tokenizer"] for row in found if row["tokenizer"] is not None]


def _snapshots(store: Tables, run_id: str, config: Mapping[str, Any]) -> list[Row]:
    trainer, sources = _sampled(config)
    read = {one.get("at") for one in (trainer, *sources)}
    return [
        {"name": s.name, "tables": s.versions, "created_at": s.created_at}
        for s in snapshots.current(store).values()
        if s.name.startswith(f"{run_id}.") or s.name in read
    ]
