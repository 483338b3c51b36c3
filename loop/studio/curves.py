"""Curves of a run's metrics as they grow: what is new is read from new rows alone."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...store import Store
from ...store.changes import ChangeFeed
from ...store.errors import reading
from ...store.query import is_in, literal
from ..report.curves import POINTS, RATIOS, by_metric, curves_sql

Points = dict[str, list[tuple[float, float]]]
"""Points (step, value) by metric."""


def of_run(rows: Iterable[Sequence[Any]], run_id: str, names: Sequence[str]) -> Points:
    """Return rows of `curves_sql` as the points of one run's metrics."""
    found = by_metric(rows, names)
    return {name: of_runs[run_id] for name, of_runs in found.items() if run_id in of_runs}


class GrowingCurves:
    """The curves of a run; for one thread."""

    def __init__(self, store: Store, run_id: str, names: Sequence[str]) -> None:
        self._store, self._run_id, self._names = store, run_id, list(names)
        self._ratios = {name: RATIOS[name] for name in names if name in RATIOS}
        self._parts: dict[str, dict[float, float]] = {}
        """Parts of ratios, by step, whose other part has not come yet."""
        self._is_lost = True
        """Whether all must be read again; true until that was done, whatever fails meanwhile."""
        self._feed = ChangeFeed(["name", "step", "value"], run_id=run_id)
        self._attempts = -1
        self._known: dict[str, dict[float, float]] = {}
        self.points: Points = {}
        """All points, in the order of steps; another object after each change."""

    def read(self) -> tuple[bool, Points]:
        """Return what was added since the last call: whether it is all points, and the points.

        All are read again when a run was resumed, since its superseded steps do not count anymore,
        when rows are gone or a step has two values, and when a curve has twice its points.
        """
        metrics, attempts = self._store.dataset("metrics"), self._store.dataset("job_events")
        self._is_lost |= attempts.version != self._attempts
        if not self._is_lost and not self._feed.moved(metrics):
            return False, {}
        is_lost, self._is_lost = self._is_lost, True
        with reading("table `metrics`"):
            if is_lost:
                self._feed.skip(metrics)
                new = None
            else:
                rows = self._feed.read(metrics).to_pylist()
                new = None if self._feed.restarted else self._added(rows)
        if new is not None and all(len(of) <= 2 * POINTS for of in self._known.values()):
            self._keep()
            return False, new
        self._parts = self._lone_parts()  # first: what is stored between the two is read again
        query = curves_sql([self._run_id], self._names)
        found = of_run(self._store.sql(query).fetchall(), self._run_id, self._names)
        self._known = {name: dict(points) for name, points in found.items()}
        self._attempts = attempts.version
        self._keep()
        # The query may have seen rows that the feed did not, and does not miss after a restore.
        self._is_lost = self._store.dataset("metrics").version != metrics.version
        return True, found

    def _lone_parts(self) -> dict[str, dict[float, float]]:
        parts: dict[str, dict[float, float]] = {p: {} for of in self._ratios.values() for p in of}
        for both in self._ratios.values():
            rows = self._store.sql(
                "SELECT name, step, value FROM metrics_current WHERE value IS NOT NULL AND "
                f"run_id = {literal(self._run_id)} AND {is_in('name', both)} "
                "QUALIFY min(name) OVER (PARTITION BY step) = max(name) OVER (PARTITION BY step)"
            )
            for name, step, value in rows.fetchall():
                parts[name][step] = value
        return parts

    def _keep(self) -> None:
        self._is_lost = False
        self.points = {name: sorted(of.items()) for name, of in self._known.items()}

    def _added(self, rows: Sequence[dict[str, Any]]) -> Points | None:
        """Return the points of these rows, and keep them; None where all must be read again."""
        new: Points = {}
        for name, points in self._values(rows).items():
            known = self._known.setdefault(name, {})
            for step, value in points:
                if known.get(step, value) != value:
                    return None
                if step not in known:
                    known[step] = value
                    new.setdefault(name, []).append((step, value))
        return new

    def _values(self, rows: Sequence[dict[str, Any]]) -> Points:
        """Return the values of new rows, and of ratios whose two parts have come."""
        found: Points = {}
        for row in rows:
            name, step, value = row["name"], row["step"], row["value"]
            if value is not None and step is not None:
                if name in self._names:
                    found.setdefault(name, []).append((step, value))
                if name in self._parts:
                    self._parts[name][step] = value
        for name, (total, count) in self._ratios.items():
            totals, counts = self._parts[total], self._parts[count]
            for step in totals.keys() & counts.keys():
                value, rows_of_step = totals.pop(step), counts.pop(step)
                if rows_of_step:
                    found.setdefault(name, []).append((step, value / rows_of_step))
        return found
