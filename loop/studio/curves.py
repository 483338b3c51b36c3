"""Curves of a run's metrics, with as many points as a chart can show."""

from collections.abc import Sequence

from ...store.query import is_in, literal
from .frame import View

POINTS = 400
"""Most points of a curve; beyond, neighboring steps are averaged."""
LENGTH = "tokens per row"
"""A curve that is made of two metrics."""


def curves_sql(run_id: str, names: Sequence[str]) -> str:
    """Return the SELECT of name, step and value of these metrics of a run."""
    return f"""
WITH named AS (
    SELECT name, step, value FROM metrics_current
    WHERE run_id = {literal(run_id)} AND {is_in("name", names)}
    UNION ALL
    SELECT '{LENGTH}', step, max(value) FILTER (name = 'train/tokens')
           / nullif(max(value) FILTER (name = 'train/rows'), 0)
    FROM metrics_current WHERE run_id = {literal(run_id)} AND name IN ('train/tokens', 'train/rows')
    GROUP BY step)
SELECT name, max(step) AS step, avg(value) AS value
FROM (SELECT *, max(step) OVER (PARTITION BY name) // {POINTS} + 1 AS width FROM named)
GROUP BY name, step // width ORDER BY name, step""".strip()


async def curves(
    view: View, run_id: str, names: Sequence[str]
) -> dict[str, list[tuple[int, float | None]]]:
    """Return the points (step, value) of each metric that the run has."""
    found = await view.rows(curves_sql(run_id, names), limit=(POINTS + 1) * (len(names) + 1))
    made: dict[str, list[tuple[int, float | None]]] = {}
    for name, step, value in found.rows:
        made.setdefault(name, []).append((step, value))
    return made
