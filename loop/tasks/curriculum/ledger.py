"""The record of a curriculum: the tables `task_selections` and `task_estimates`."""

from collections.abc import Iterable, Sequence

import polars as pl

from ....store.query import literal
from ...runs.job import Job
from .selectors import Chosen
from .taskset import TasksetSelector


class SelectionLedger:
    """Records the selections and estimates of a run's curriculum, and reads them on resume."""

    def __init__(self, job: Job, *, every: int) -> None:
        """Record the estimates of all tasks after each `every` batches."""
        self._job, self._every = job, every
        self._run = f"run_id = {literal(job.run_id)}"
        self._selected: dict[int, list[str]] | None = None
        self._believed = 0
        """The newest batch after which estimates are recorded."""

    def selected(self, number: int) -> list[str] | None:
        """Return the recorded tasks of a batch; later calls are for later batches."""
        if self._selected is None:
            rows = self._job.store.sql(
                "SELECT batch, list(task_id ORDER BY position) FROM task_selections "
                f"WHERE {self._run} AND batch >= {number} GROUP BY batch"
            ).fetchall()
            self._selected = dict(rows)
        return self._selected.get(number)

    def select(self, number: int, chosen: Iterable[tuple[TasksetSelector, Chosen]]) -> None:
        """Record the tasks of a batch, before their rollouts."""
        rows: list[dict[str, object]] = []
        for part, one in chosen:
            for i, place in enumerate(one.places):
                rows.append(
                    {
                        **self._key(number),
                        "position": len(rows),
                        "task_id": part.tasks[place].task_id,
                        "selector": f"{part.name}: {part.described}".removeprefix(": "),
                        "score": None if one.scores is None else _number(one.scores[i]),
                        "expected": None if one.expected is None else float(one.expected[i]),
                    }
                )
        self._job.store.append("task_selections", rows)

    def believe(self, number: int, parts: Sequence[TasksetSelector], found: pl.DataFrame) -> None:
        """Record the estimates after a batch: those of its tasks or, at intervals, of all tasks.

        What another attempt recorded is not recorded again.
        """
        if number <= self._believed:
            return
        rates = dict(zip(found["task_id"], found["passes"] / found["rollouts"], strict=True))
        if number % self._every == 0:
            self._append(number, parts, None, rates)
        elif rates:
            self._append(number, parts, set(rates), rates)
        self._believed = number

    def complete(self, number: int, parts: Sequence[TasksetSelector]) -> None:
        """Record the estimates after a batch of all tasks that have no record of it."""
        known = self._job.store.sql(
            f"SELECT task_id FROM task_estimates WHERE {self._run} AND batch = {number}"
        ).fetchall()
        everything = {task_id for part in parts if part.learner for task_id in part.places}
        if number and everything - {task_id for (task_id,) in known}:
            self._append(number, parts, everything - {task_id for (task_id,) in known}, {})

    def _append(
        self,
        number: int,
        parts: Sequence[TasksetSelector],
        only: set[str] | None,
        rates: dict[str, float],
    ) -> None:
        rows = []
        for part in parts:
            if part.learner is None:
                continue
            of = part.learner.beliefs
            rows += [
                {
                    **self._key(number),
                    "task_id": task_id,
                    "alpha": float(of.alpha[place]),
                    "beta": float(of.beta[place]),
                    "pass_rate": rates.get(task_id),
                    "capability": of.capability,
                    "rho": of.rho,
                }
                for task_id, place in part.places.items()
                if only is None or task_id in only
            ]
        if rows:
            self._job.store.append("task_estimates", rows)

    def restore(self, parts: Sequence[TasksetSelector]) -> int:
        """Load the newest estimates that are recorded for all tasks; return their batch.

        0: there are none, and all batches must be learned from again.
        """
        size = sum(len(part.places) for part in parts if part.learner is not None)
        rows = self._job.store.sql(
            "SELECT batch, task_id, alpha, beta, capability, rho, max(batch) OVER () AS newest, "
            "count(DISTINCT task_id) OVER (PARTITION BY batch) AS num_tasks "
            f"FROM task_estimates WHERE {self._run} "
            "QUALIFY row_number() OVER (PARTITION BY batch, task_id ORDER BY attempt DESC) = 1"
        ).pl()
        self._believed = rows["newest"].max() or 0  # pyright: ignore[reportAttributeAccessIssue]
        # Most batches have only the estimates of their own tasks.
        whole = rows.filter(pl.col("num_tasks") == size)
        if whole.is_empty():
            return 0
        batch = whole["batch"].max()
        for row in whole.filter(pl.col("batch") == batch).iter_rows(named=True):
            for part in parts:
                place = part.places.get(row["task_id"])
                if place is not None and part.learner is not None:
                    of = part.learner.beliefs
                    of.alpha[place], of.beta[place] = row["alpha"], row["beta"]
                    of.capability, of.rho = row["capability"], row["rho"]
        return int(batch)  # pyright: ignore[reportArgumentType]

    def _key(self, number: int) -> dict[str, object]:
        return {"run_id": self._job.run_id, "attempt": self._job.attempt, "batch": number}


def _number(value: float) -> float | None:
    # NaN, which the store refuses
    return None if value != value else float(value)
