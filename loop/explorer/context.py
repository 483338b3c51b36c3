"""The state that exploration strategies share: pacing, tasks, workers, weights, writing rows."""

import asyncio
import gc
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ...pipelines.inline import explorer_chain
from ...store import Experience
from ...store.errors import JobError
from ...store.replay.row_index import Index
from ..algorithms import Algorithm
from ..rollouts.setup import RolloutSpecs, start_worker
from ..rollouts.workers import GroupRequest, WorkerPool
from ..rollouts.writer import RolloutWriter
from ..runs.job import Job, Watch
from ..runs.metrics import Listener, Metrics
from ..schedule.pacing import Pacer
from ..schedule.samplers import own_sides
from ..schedule.units import batch_tasks, new_units, order, own_where, units_of
from ..tasks.curriculum import Curriculum
from ..weight_sync import (
    PublishedWeights,
    WeightCache,
    WeightsLostError,
    WeightSubscriber,
    started_from,
)

_log = logging.getLogger(__name__)

_WAY_OUT = "fix it, then continue with `--resume` (`resume=True` in Python)"


class ExploreContext:
    """The state of one explore job, shared by its strategy and its live evaluation."""

    curriculum: Curriculum
    """Set once the job is on record, so that what it raises is the job's failure."""

    def __init__(
        self,
        job: Job,
        algorithm: Algorithm,
        *,
        stop: threading.Event,
        listener: Listener | None,
        cache: WeightCache | None,
    ) -> None:
        config = job.config
        assert config.explorer is not None, "an explorer has its section in the configuration"
        self.job, self.config, self.explorer = job, config, config.explorer
        self.stop, self._listener = stop, listener
        self.steps = config.trainer.steps or 0
        self.batch_tasks = batch_tasks(config, algorithm)
        self._algorithm = algorithm
        self.pacer = self._new_pacer()
        self.watch = Watch(job)
        self.subscriber = WeightSubscriber(job, self.watch, cache=cache)
        self.metrics = Metrics(job)
        self.writer = RolloutWriter(
            job.store, explorer_chain(self.explorer.operators), lineage_id=f"{job.run_id}/explore"
        )
        self.evaluate_until: Callable[[int], Awaitable[None]] = _no_evaluation
        """Runs evaluations that are due up to a version; this may change the workers' weights."""
        self.is_evaluating = False
        """Whether the workers must keep their weights, which are being evaluated."""
        self.pool: WorkerPool | None = None
        """The workers, once they are started."""
        self._index = Index(
            job.store,
            grouped=algorithm.grouped,
            where=own_where(config),
            sides=own_sides(config),
            run_id=job.run_id,
            order=order(config, algorithm),
        )
        self._useless = 0
        self._scaled: Callable[[], dict[str, float]] = dict

    def units(self, requests: Iterable[GroupRequest]) -> int:
        """Return how many units, groups or rollouts, these groups will be."""
        tasksets = [request.task.taskset for request in requests]
        return sum(units_of(self.config, self._algorithm, taskset) for taskset in tasksets)

    async def weights(self, version: int) -> PublishedWeights:
        """Return the weights of a version, waiting until they are published."""
        return await asyncio.to_thread(
            self.job.store.wait_for,
            lambda: self._look(version),
            tables=("policies", "job_events"),
            seconds=self.config.schedule.timeout,
            describe=lambda: (
                f"the explorer needs policy version {version} of run `{self.job.run_id}`, newest "
                f"is {self.subscriber.newest}; is `rlake train` running?"
            ),
            stop=self.stop,
        )

    def _look(self, version: int) -> PublishedWeights | None:
        found = self.subscriber.find(version)
        if found is None:
            self.watch.check("train")
        return found

    async def update(self, pool: WorkerPool, weights: PublishedWeights) -> bool:
        """Update the workers' weights; return False if these were lost with their sender.

        The workers then go on with the weights that they have.
        """
        try:
            await pool.update_weights(weights)
        except WeightsLostError as error:
            _log.warning("the explorer goes on with older weights: %s", error)
            return False
        return True

    async def workers(self, folder: Path) -> WorkerPool:
        """Return the workers, started on first use with the model of a folder."""
        if self.pool is None and self.config.ray is not None:
            from .ray.pool import start_ray_workers

            made = await start_ray_workers(self.job, folder, self._demand())
            self.pool, self._scaled = made
        elif self.pool is None:
            model = started_from(self.job, folder)
            specs = RolloutSpecs(self.config)
            self.pool = WorkerPool([start_worker(self.config, specs, model, self.job.store)])
            # The rows of each batch set off full collections, each of which would walk all modules.
            gc.freeze()
        self.pool.when_lost = self.subscriber.lose
        return self.pool

    def _demand(self) -> Callable[[], Awaitable[int]]:
        """Return what tells whether the trainer waits for rows, or explorers wait for it."""
        # Its own, since that of the strategy is read by another thread.
        published = WeightSubscriber(self.job, self.watch)

        async def demand() -> int:
            found = await asyncio.to_thread(published.latest)
            version, pacer = (-1 if found is None else found.version), self.pacer
            # The trainer takes `publish_every` steps before it publishes again.
            if pacer.step <= version + self.config.schedule.publish_every:
                return 1
            return 0 if pacer.admits(0, version) else -1

        return demand

    def _new_pacer(self) -> Pacer:
        return Pacer(self.config.schedule, new_units=new_units(self.config))

    def pace(self) -> None:
        """Report to the pacer which stored rows may be trained on, in the trainer's own order."""
        # Through the trainer's own index, so that both count the same rows in the same order.
        known = len(self._index)
        self._index.refresh()
        if self._index.rebuilt:  # `where` looks at other tables, and they changed
            self.pacer, known = self._new_pacer(), 0
        drawable = self._index.drawable[known:]
        self.pacer.stored(self._index.versions[known:][drawable].tolist())

    def first_batch(self) -> int:
        """Return the first batch with groups that are not stored."""
        stored, whole = self.stored_groups(), set(range(self.batch_tasks))
        batch = 1
        while whole <= set(stored.get(batch, ())):
            batch += 1
        return batch

    def stored_groups(self) -> dict[int, dict[int, int]]:
        """Return the oldest version of each stored group, by batch and index."""
        rows = self.job.store.sql(
            "SELECT batch, group_index, min(policy_version) FROM experiences "
            f"WHERE run_id = '{self.job.run_id}' AND parent_id IS NULL AND group_index IS NOT NULL "
            "GROUP BY ALL"
        ).fetchall()
        found: dict[int, dict[int, int]] = {}
        for batch, index, version in rows:
            found.setdefault(batch, {})[index] = version
        return found

    def check(self, rows: Sequence[Experience]) -> None:
        """Raise JobError after too many consecutive batches without a usable row."""
        usable = [row for row in rows if row.drop_reason is None]
        self._useless = 0 if usable else self._useless + 1
        if self._useless >= self.explorer.max_failed_batches:
            raise JobError(
                f"{self._useless} batches in a row gave no usable row; the last: "
                f"{rows[-1].drop_reason}; {_WAY_OUT}"
            )

    def note(self, batch: int, rows: Sequence[Experience], seconds: float) -> None:
        """Store the metrics of a batch."""
        values = measured(rows, self.curriculum.tasksets) | {"explore/seconds": seconds}
        values |= self._scaled()
        self.metrics.add(batch, values)
        self.report("explore", batch, values)

    def report(self, job: str, step: int, values: Mapping[str, float]) -> None:
        """Pass metrics to the listener."""
        if self._listener:
            self._listener(job, step, values)


async def _no_evaluation(version: int) -> None:
    pass


def measured(rows: Sequence[Experience], tasksets: Mapping[str, str]) -> dict[str, float]:
    """Return the metrics of a batch's rows without greedy rollouts, with sums of counters.

    `tasksets` names those of tasks whose rewards are reported separately too.
    """
    # With those of greedy rollouts: they took time to sample as well.
    tokens = sum(s["num_tokens"] for row in rows for s in row.segments or ())
    rows = [row for row in rows if "is_greedy" not in row.metrics]
    scored = [row.reward for row in rows if row.reward is not None]
    by_taskset: dict[str, list[float]] = {}
    for row in rows:
        if row.reward is not None and (name := tasksets.get(row.task_id)):
            by_taskset.setdefault(name, []).append(row.reward)
    values = {
        "explore/rows": float(len(rows)),
        "explore/failed_rows": float(sum(row.drop_reason is not None for row in rows)),
        "explore/unscored_rows": float(len(rows) - len(scored)),
        "explore/sampled_tokens": float(tokens),
    }
    if scored:
        values["explore/reward_mean"] = sum(scored) / len(scored)
    for name, of_taskset in by_taskset.items():
        values[f"explore/{name}/reward_mean"] = sum(of_taskset) / len(of_taskset)
    reasons = Counter(row.finish_reason for row in rows if row.finish_reason)
    values |= {f"explore/finish/{name}": float(count) for name, count in reasons.items()}
    for name, value in (one for row in rows for one in row.metrics.items()):
        if name.startswith(("tools/", "environment/")):
            values[f"explore/{name}"] = values.get(f"explore/{name}", 0.0) + value
    return values
