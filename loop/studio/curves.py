"""Curves of a run's metrics, with as many points as a chart can show."""

from collections.abc import Sequence
from functools import lru_cache

from ...store.query import is_in, literal
from .frame import View
from .queries import Rows

POINTS = 400
"""Most points of a curve; beyond, neighboring steps are averaged."""
LENGTH = "tokens per row"
"""A curve that is made of two metrics."""
_TOKENS, _ROWS = "train/tokens", "train/rows"


class Curves(dict[str, list[tuple[int, float | None]]]):
    """Points (step, value) by metric; hashed by identity, since browsers share them."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)


def curves_sql(run_id: str, names: Sequence[str]) -> str:
    """Return the SELECT of name, step and value of these metrics of a run."""
    wanted = dict.fromkeys((*names, *((_TOKENS, _ROWS) if LENGTH in names else ())))
    return f"""
SELECT name, max(step) AS step, avg(value) AS value
FROM (SELECT name, step, value, max(step) OVER (PARTITION BY name) // {POINTS} + 1 AS width
      FROM metrics_current WHERE run_id = {literal(run_id)}
      AND {is_in("name", [name for name in wanted if name != LENGTH])})
GROUP BY name, step // width ORDER BY name, step""".strip()


async def curves(view: View, run_id: str, names: Sequence[str]) -> Curves:
    """Return the curves of the metrics that the run has; browsers share them."""
    limit = (POINTS + 1) * (len(names) + 2)
    return _curves(await view.rows(curves_sql(run_id, names), limit=limit, max_age=0.9))


@lru_cache(16)
def _curves(found: Rows) -> Curves:
    made = Curves()
    for name, step, value in found.rows:
        made.setdefault(name, []).append((step, value))
    rows = dict(made.get(_ROWS, ()))
    made[LENGTH] = [
        (step, tokens / (rows[step] or 1)) for step, tokens in made.get(_TOKENS, ()) if tokens
    ]
    return Curves({name: points for name, points in made.items() if points})
