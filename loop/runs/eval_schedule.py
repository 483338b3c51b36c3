"""Which versions of a run were measured while it goes on, and for which weights are still kept."""

from collections.abc import Collection

from ...store import Store
from ...store.query import literal
from ..config import RunConfig

UNSCORED = "eval/unscored_rows"
"""The metric that every measurement has."""


def measured_versions(store: Store, run_id: str, metric: str) -> dict[int, float | None]:
    """Return a metric of a run's measurements, by the versions that were measured."""
    rows = store.sql(
        "SELECT step, arg_max(value, created_at) FROM metrics WHERE job = 'evaluate' "
        f"AND run_id = {literal(run_id)} AND name = {literal(metric)} GROUP BY step"
    ).fetchall()
    return dict(rows)


def waiting(store: Store, config: RunConfig, versions: Collection[int]) -> set[int]:
    """Return which of some versions are still to be measured while the run goes on."""
    settings, last = config.evaluate, config.trainer.steps
    if settings is None:
        return set()
    due = {version for version in versions if settings.is_due(version, last=last)}
    if not due:
        return due
    return due - measured_versions(store, config.name, UNSCORED).keys()
