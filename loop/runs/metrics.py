"""Numbers on their way to the `metrics` table: gathered, stored once a second at most."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Self

from ...store.errors import JobError
from .job import Job
from .tracking import Monitoring, monitored

FLUSH_SECONDS = 1.0
"""Longest time that a number waits; at checkpoints and at the end none does."""


class Metrics:
    """Gathers the numbers of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows: list[dict[str, object]] = []
        self._flushed = monotonic()
        self._monitoring = Monitoring(())
        self._newest = 0

    @contextmanager
    def shown(self, *, start_step: int | None) -> Iterator[Self]:
        """Let the run's trackers have the numbers too, until the job ends.

        What they have of `start_step` and later ones belongs to a superseded attempt. The job must
        be on record.
        """
        with monitored(self._job, start_step=start_step) as self._monitoring:
            try:
                yield self
            except JobError:
                self.flush()  # they tell what went wrong
                raise
        self.add(self._newest, self._monitoring.counts())
        self.flush()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Note the numbers of a step; what is not finite is stored as NULL, and not shown."""
        self._newest = step
        self._monitoring.log(step, {k: float(v) for k, v in values.items() if math.isfinite(v)})
        for name, value in values.items():
            self._rows.append(
                {
                    "run_id": self._job.run_id,
                    "attempt": self._job.attempt,
                    "job": self._job.name,
                    "step": step,
                    "name": name,
                    "value": float(value) if math.isfinite(value) else None,
                }
            )
        if monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Store what was gathered."""
        if self._rows:
            self._job.store.append("metrics", self._rows)
        self._rows = []
        self._flushed = monotonic()


Listener = Callable[[str, int, Mapping[str, float]], None]
"""Called as (job, step, metrics) after each batch and each step."""
