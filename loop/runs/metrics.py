"""Metrics of a job: their way to the table `metrics` and to trackers; evaluated versions."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Self

from ...store import Store
from ...store.errors import JobError
from ...store.query import literal
from ..config import RunConfig
from .job import Job
from .tracking import Trackers, reporting

FLUSH_SECONDS = 1.0
"""Most seconds that metrics are buffered; checkpoints and the end of a job flush them."""


class Metrics:
    """Buffers the metrics of one job and appends them to the store."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows: list[dict[str, object]] = []
        self._flushed = monotonic()
        self._trackers = Trackers(())
        self._newest = 0

    @contextmanager
    def shown(self, *, start_step: int | None) -> Iterator[Self]:
        """Send the metrics to the run's trackers too, until the job ends.

        What trackers have of `start_step` and later steps belongs to a superseded attempt. The job
        must be recorded already.
        """
        with reporting(self._job, start_step=start_step) as self._trackers:
            try:
                yield self
            except JobError:
                self.flush()  # they may show the cause
                raise
        self.add(self._newest, self._trackers.counts())
        self.flush()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the metrics of a step; values that are not finite are stored as NULL."""
        self._newest = step
        # Trackers get finite values only; the store keeps a row with NULL for each other one.
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._trackers.log(step, finite)
        job = self._job
        key = {"run_id": job.run_id, "attempt": job.attempt, "job": job.name, "step": step}
        self._rows += [{**key, "name": name, "value": finite.get(name)} for name in values]
        if monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Append the buffered metrics to the store."""
        if self._rows:
            self._job.store.append("metrics", self._rows)
        self._rows = []
        self._flushed = monotonic()


Listener = Callable[[str, int, Mapping[str, float]], None]
"""Called as (job, step, metrics) after each batch and each step."""


UNSCORED = "eval/unscored_rows"


def evaluated_versions(store: Store, run_id: str, metric: str) -> dict[int, float | None]:
    """Return a metric of a run's evaluations, by the versions that were evaluated."""
    rows = store.sql(
        "SELECT step, arg_max(value, created_at) FROM metrics WHERE job = 'evaluate' "
        f"AND run_id = {literal(run_id)} AND name = {literal(metric)} GROUP BY step"
    ).fetchall()
    return dict(rows)


def waiting(store: Store, config: RunConfig, versions: Collection[int]) -> set[int]:
    """Return which of these versions are still to be evaluated during the run."""
    settings, last = config.evaluate, config.trainer.steps
    if settings is None:
        return set()
    due = {version for version in versions if settings.is_due(version, last=last)}
    if not due:
        return due
    return due - evaluated_versions(store, config.name, UNSCORED).keys()
