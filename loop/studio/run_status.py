"""Where the runs of a store stand: one query, and whether their processes live."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...store import Store
from ...store.query import literal
from ..runs.job import is_live
from .queries import Queries

OLDEST_SECONDS = 30.0
"""How old the numbers may be in a large store, in seconds."""
_LOCK_SECONDS = 3.0
"""How often the locks of jobs are looked at, in seconds."""
_RECENT_STEPS = 20
RUNS = f"""
WITH jobs AS (
    SELECT run_id, list({{'job': job, 'status': status}} ORDER BY job DESC) AS jobs,
           min(started_at) AS started_at, max(ended_at) AS ended_at,
           any_value(error) FILTER (status = 'failed') AS error,
           arg_max(config, created_at) FILTER (job <> 'evaluate') AS config
    FROM runs GROUP BY run_id),
progress AS (
    SELECT run_id, max(step) FILTER (job = 'train') AS step, max(created_at) AS active_at,
           arg_max(value, step) FILTER (name = 'train/reward_mean') AS reward,
           arg_max(value, step) FILTER (name = 'train/lag_max') AS lag_max,
           sum(value) FILTER (name = 'explore/failed_rows') AS failed_rows
    FROM metrics_current GROUP BY run_id),
speed AS (
    SELECT run_id, (count(*) - 1) * 60 / nullif(epoch(max(created_at) - min(created_at)), 0)
           AS steps_per_minute
    FROM (SELECT run_id, created_at FROM metrics_current WHERE name = 'train/step_seconds'
          QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY step DESC) <= {_RECENT_STEPS})
    GROUP BY run_id)
SELECT j.run_id, j.jobs, p.step,
       try_cast(j.config->>'$.trainer.steps' AS BIGINT) AS steps,
       s.steps_per_minute, p.reward, p.lag_max, b.fresh, b.stale, p.failed_rows,
       j.started_at, p.active_at, j.error
FROM jobs j LEFT JOIN progress p USING (run_id) LEFT JOIN speed s USING (run_id)
LEFT JOIN backlog b USING (run_id)
ORDER BY coalesce(p.active_at, j.started_at) DESC, run_id
"""
"""A row for each run, the one that was active last first."""


def status_of(store: Store, run_id: str, jobs: Sequence[Mapping[str, str]]) -> str:
    """Return the status of a run: that of its jobs, and dead where a process is gone.

    A job that was killed says forever that it is running; its lock says that it does not.
    """
    states = [
        "dead"
        if one["status"] == "running" and is_live(store, run_id, one["job"]) is False
        else one["status"]
        for one in jobs
        if one["job"] != "evaluate"
    ] or [one["status"] for one in jobs]
    order = ("failed", "dead", "running", "interrupted", "done")
    return next((name for name in order if name in states), "unknown")


async def runs(queries: Queries, run_id: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of `RUNS` with the status of each run, of all runs or of one."""
    which = f"SELECT * FROM ({RUNS}) WHERE run_id = {literal(run_id)}" if run_id else RUNS
    rows = await queries.rows(which, max_age=OLDEST_SECONDS)
    found = rows.records()

    def add() -> list[dict[str, Any]]:
        return [
            one | {"status": status_of(queries.store, one["run_id"], one["jobs"])} for one in found
        ]

    return await queries.shared(rows, add, max_age=_LOCK_SECONDS)
