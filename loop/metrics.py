"""Numbers on their way to the `metrics` table: gathered, stored once a second at most."""

import math
from collections.abc import Mapping
from time import monotonic

from .runs import Job

FLUSH_SECONDS = 1.0
"""Longest time that a number waits; at checkpoints and at the end none does."""


class Metrics:
    """Gathers the numbers of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows: list[dict[str, object]] = []
        self._flushed = monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Note the numbers of a step; what is not finite is stored as NULL."""
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
