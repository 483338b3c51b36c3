"""What a store must show after anything happened to its jobs: nothing lost, doubled or untrue."""

from collections.abc import Iterable

import pyarrow as pa

from rlake.store import Store
from rlake.store.query import QuerySession
from rlake.store.schema import TABLES

LOST = "SELECT experience_id FROM acknowledged ANTI JOIN experiences USING (experience_id)"
"""Rows that a writer was told are stored, and are not."""

DUPLICATED = " UNION ALL ".join(
    f"SELECT '{t.name}' AS name, concat_ws('/', {', '.join(t.key)}) AS key FROM {t.name} "
    f"GROUP BY {', '.join(t.key)} HAVING count(*) > 1"
    for t in TABLES.values()
)
"""Keys that a table holds twice."""

SKIPPED = """
    WITH trained AS (
        SELECT run_id, (config->>'$.trainer.steps')::BIGINT AS steps
        FROM runs WHERE job = 'train'),
    due AS (SELECT run_id, unnest(range(1, steps + 1)) AS step FROM trained),
    drawn AS (
        SELECT run_id, step, count(*) AS n, count(DISTINCT position) AS places,
               max(position) + 1 AS places_due, max(count(*)) OVER (PARTITION BY run_id) AS rows_due
        FROM draws_current GROUP BY run_id, step)
    SELECT 'step' AS what, run_id || '/' || step AS name
    FROM due LEFT JOIN drawn USING (run_id, step)
    WHERE n IS NULL OR n <> rows_due OR n <> places OR n <> places_due
    UNION ALL
    SELECT 'row drawn twice', experience_id FROM draws_current
    GROUP BY run_id, experience_id, epoch HAVING count(*) > 1
    UNION ALL
    SELECT 'row never drawn', experience_id FROM experiences JOIN trained USING (run_id)
    WHERE drop_reason IS NULL AND (run_id, experience_id) NOT IN (
        SELECT (run_id, experience_id) FROM draws_current)
    UNION ALL
    SELECT 'group', group_id FROM experiences
    GROUP BY run_id, group_id HAVING count(DISTINCT rollout_index) <> max(rollout_index) + 1
    UNION ALL
    SELECT 'batch', run_id FROM experiences
    WHERE batch IS NOT NULL AND run_id IN (SELECT run_id FROM job_events)
    GROUP BY run_id HAVING count(DISTINCT batch) <> max(batch)
"""
"""Steps, rows, groups and batches that an on-policy run passed over or did twice."""

UNTRUE = """
    WITH served AS (
        SELECT *, unnest(segments) AS segment, unnest(digests) AS weights
        FROM experiences SEMI JOIN policies USING (run_id)
        WHERE source = 'explorer' AND segments IS NOT NULL)
    SELECT 'weights' AS what, experience_id FROM served
    ANTI JOIN policies p ON p.run_id = served.run_id AND p.digest = served.weights
        AND p.policy_version = served.segment.policy_version
    UNION ALL
    SELECT 'tokens', experience_id FROM experiences
    WHERE source = 'explorer' AND loss_mask IS NOT NULL AND segments IS NOT NULL
        AND len(list_filter(loss_mask, lambda one: one))
            <> list_sum(list_transform(segments, lambda one: one.num_tokens))
    UNION ALL
    SELECT 'version', experience_id FROM experiences
    WHERE source = 'explorer' AND policy_version <> segments[1].policy_version
    ORDER BY ALL
"""
"""Rows with tokens of weights that nobody published as that version, or of none."""


def audit(store: Store, acknowledged: Iterable[str]) -> dict[str, list[tuple[object, ...]]]:
    """Return what was lost, what is there twice, skipped or untrue: nothing, if all is well."""
    console = QuerySession()
    console.show(store.versions(), store.open_at)
    ids = pa.table({"experience_id": pa.array(list(acknowledged), pa.string())})
    console.put("acknowledged", ids)
    queries = {"lost": LOST, "duplicated": DUPLICATED, "skipped": SKIPPED, "untrue": UNTRUE}
    return {name: console.sql(query).fetchall() for name, query in queries.items()}


CLEAN: dict[str, list[tuple[object, ...]]] = {
    "lost": [],
    "duplicated": [],
    "skipped": [],
    "untrue": [],
}
