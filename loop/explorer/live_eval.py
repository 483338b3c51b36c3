"""Measuring a run's policy while the run goes on: with the explorer's engine, before it goes on.

Whether a version is still to be measured is what the store says: the rows of a measurement have a
run_id that follows from what is measured and how, so a run that was killed keeps the groups that
were stored, and tries the others. Nothing of this is drawn, or decides what is explored.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from ...pipelines.inline import Chain
from ...store import Task
from ...store.errors import JobError
from ...store.query import literal
from ..config import EvaluateConfig
from ..evaluation.history import rows_id_during, tries
from ..evaluation.policies import EvaluatedPolicy
from ..evaluation.result import Evaluation, evaluation
from ..evaluation.tasks import labelled, measured_tasks
from ..inference.cancellation import STOP_SECONDS
from ..rollouts.setup import used_functions
from ..rollouts.workers import GroupRequest, WorkerPool
from ..rollouts.writer import RolloutWriter
from ..runs.eval_schedule import UNSCORED, measured_versions
from ..runs.job import beside, pinned, recorded
from ..runs.metrics import Metrics
from ..weight_sync import PublishedWeights
from .context import ExploreContext

_log = logging.getLogger(__name__)


class LiveEvaluation:
    """Measures the versions of a run that are due, each with exactly its own weights."""

    def __init__(self, context: ExploreContext) -> None:
        """Begin with what the store says was measured; ConfigError without tasks."""
        config = context.config
        self._context, self._settings = context, config.evaluate or EvaluateConfig()
        self._job = beside(context.job, "evaluate", functions=used_functions(config, "evaluate"))
        self._metrics = Metrics(self._job)
        self._tasks = measured_tasks(pinned(context.job, "tasks"), self._settings)
        self._ids = [task.task_id for task in self._tasks]
        self._whole = self._whole_ones()
        self._told = set(measured_versions(context.job.store, context.job.run_id, UNSCORED))
        self._next = 0

    @contextmanager
    def on_record(self) -> Iterator[None]:
        """Let `runs` and the run's trackers know of the job until it ends."""
        with recorded(self._job, start_step=0), self._metrics.shown(start_step=None):
            yield

    async def until(self, version: int) -> None:
        """Measure all versions up to this one that are due, oldest first.

        The engine is left with the weights of the last that was measured. Raises JobError when the
        run is stopped, StarvedError when weights do not come in time.
        """
        last = self._context.steps
        while self._next <= version:
            if self._settings.is_due(self._next, last=last):
                await self._measure(await self._context.weights(self._next))
            self._next += 1

    async def _measure(self, weights: PublishedWeights) -> None:
        """Try what is not stored yet, and store what all tries come to, unless that is."""
        run_id = rows_id_during(self._job, weights, self._ids)
        if run_id in self._whole and weights.version in self._told:
            return
        stored = await asyncio.to_thread(self._stored, run_id)
        missing = [(i, t) for i, t in enumerate(self._tasks) if t.task_id not in stored]
        if missing and not self._are_there(weights):
            _log.warning("version %d is not measured: its weights are gone", weights.version)
            return
        if missing:
            async with self._with(weights) as team:
                size = self._settings.batch_size
                for first in range(0, len(missing), size):
                    await self._try(team, missing[first : first + size], weights.version, run_id)
        found = await asyncio.to_thread(self._found, weights, run_id)
        self._metrics.add(weights.version, found.numbers)
        self._metrics.flush()
        self._context.tell("evaluate", weights.version, found.numbers)

    @asynccontextmanager
    async def _with(self, weights: PublishedWeights) -> AsyncIterator[WorkerPool]:
        """Give the explorer's runners these weights; who else has some for them waits."""
        team = await self._context.workers(weights.folder)
        if team.version != weights.version:
            await team.update_weights(weights.weights)
        self._context.is_evaluating = True
        try:
            yield team
        finally:
            self._context.is_evaluating = False

    async def _try(
        self, team: WorkerPool, placed: Sequence[tuple[int, Task]], version: int, run_id: str
    ) -> None:
        """Try tasks, all at once, and store the rows of each when its tries are finished."""
        context = self._context
        storing = RolloutWriter(context.job.store, Chain(()), lineage_id=run_id)

        async def one(assignment: GroupRequest) -> None:
            rows = await team.run_group(assignment)
            await storing.add([labelled(row, assignment.task.split) for row in rows])

        pending = {
            asyncio.create_task(
                one(GroupRequest(task=task, step=version, index=place, evaluation_id=run_id))
            )
            for place, task in placed
        }
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                if context.stop.is_set():
                    raise JobError(f"the run was stopped while version {version} was measured")
                context.watch.check("train")
        finally:
            for task in pending:
                task.cancel()

    def _whole_ones(self) -> Collection[str]:
        """Return the measurements of which all tasks' tries are stored."""
        rows = self._job.store.sql(
            "SELECT run_id FROM experiences "
            f"WHERE starts_with(run_id, {literal(self._job.run_id + ':eval-')}) "
            f"GROUP BY run_id HAVING count(DISTINCT task_id) = {len(self._tasks)}"
        ).fetchall()
        return {run_id for (run_id,) in rows}

    def _stored(self, run_id: str) -> Collection[str]:
        """Return the tasks whose tries are stored."""
        rows = self._job.store.sql(
            f"SELECT DISTINCT task_id FROM experiences WHERE run_id = {literal(run_id)}"
        ).fetchall()
        return {task for (task,) in rows}

    def _found(self, weights: PublishedWeights, run_id: str) -> Evaluation:
        store, seed = self._job.store, self._context.config.seed
        one = EvaluatedPolicy(version=weights.version, weights=weights)
        return evaluation(self._settings, self._tasks, one, run_id, tries(store, run_id), seed=seed)

    def _are_there(self, weights: PublishedWeights) -> bool:
        newest = self._context.subscriber.latest()
        sends = newest is not None and weights.address == newest.address is not None
        return weights.state is not None or sends or weights.file.is_file()
