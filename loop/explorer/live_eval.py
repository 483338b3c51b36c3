"""Live evaluation: evaluate the policy during its run, with the explorer's engine.

Which versions are still due follows from the store: the run_id of an evaluation's rows is a
function of what is evaluated and how, so a run that was killed keeps the groups that were stored,
and runs the others. These rows are never drawn, and do not affect exploration.
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
from ..evaluation.history import rollout_scores, rows_id_during
from ..evaluation.policies import EvaluatedPolicy
from ..evaluation.result import Evaluation, evaluation
from ..evaluation.tasks import evaluation_tasks, labeled
from ..inference.cancellation import STOP_SECONDS
from ..rollouts.setup import used_functions
from ..rollouts.workers import GroupRequest, WorkerPool
from ..rollouts.writer import RolloutWriter
from ..runs.job import pinned, recorded, sibling
from ..runs.metrics import UNSCORED, Metrics, evaluated_versions
from ..weight_sync import PublishedWeights
from .context import ExploreContext

_log = logging.getLogger(__name__)


class LiveEvaluation:
    """Evaluates the versions of a run that are due, each with exactly its own weights."""

    def __init__(self, context: ExploreContext) -> None:
        """Continue from the evaluations in the store. Raises ConfigError without tasks."""
        config = context.config
        self._context, self._settings = context, config.evaluate or EvaluateConfig()
        self._job = sibling(context.job, "evaluate", functions=used_functions(config, "evaluate"))
        self._metrics = Metrics(self._job)
        # Pinned, because versions are compared: tasks that are added meanwhile
        # would change the mean.
        self._tasks = evaluation_tasks(pinned(context.job, "tasks"), self._settings)
        self._ids = [task.task_id for task in self._tasks]
        self._complete = self._complete_ids()
        self._evaluated = set(evaluated_versions(context.job.store, context.job.run_id, UNSCORED))
        self._next = 0

    @contextmanager
    def on_record(self) -> Iterator[None]:
        """Record the job in `runs` and the run's trackers until it ends."""
        with recorded(self._job, start_step=0), self._metrics.shown(start_step=None):
            yield

    async def until(self, version: int) -> None:
        """Evaluate all versions up to this one that are due, oldest first.

        The engine keeps the weights of the last one. Raises JobError if the run is stopped, and
        StarvedError if weights are not published in time.
        """
        last = self._context.steps
        while self._next <= version:
            if self._settings.is_due(self._next, last=last):
                await self._evaluate(await self._context.weights(self._next))
            self._next += 1

    async def _evaluate(self, weights: PublishedWeights) -> None:
        """Run the rollouts that are not stored yet, and store the result unless it is stored."""
        run_id = rows_id_during(self._job, weights, self._ids)
        # The metrics may be missing although the rows are complete: a kill can fall in between.
        if run_id in self._complete and weights.version in self._evaluated:
            return
        stored = await asyncio.to_thread(self._stored, run_id)
        missing = [(i, t) for i, t in enumerate(self._tasks) if t.task_id not in stored]
        if missing and not (self._are_available(weights) and await self._load(weights)):
            _log.warning("version %d is not evaluated: its weights are gone", weights.version)
            return
        if missing:
            async with self._with(weights) as pool:
                size = self._settings.batch_size
                for first in range(0, len(missing), size):
                    await self._run(pool, missing[first : first + size], weights.version, run_id)
        found = await asyncio.to_thread(self._found, weights, run_id)
        self._metrics.add(weights.version, found.numbers)
        self._metrics.flush()
        self._context.report("evaluate", weights.version, found.numbers)

    async def _load(self, weights: PublishedWeights) -> bool:
        """Give the explorer's workers these weights; return False if they are lost."""
        pool = await self._context.workers(weights.folder)
        return pool.version == weights.version or await self._context.update(pool, weights)

    @asynccontextmanager
    async def _with(self, weights: PublishedWeights) -> AsyncIterator[WorkerPool]:
        """Keep these weights, which the explorer's workers have, until the block ends."""
        pool = await self._context.workers(weights.folder)
        self._context.is_evaluating = True
        try:
            yield pool
        finally:
            self._context.is_evaluating = False

    async def _run(
        self, pool: WorkerPool, tasks: Sequence[tuple[int, Task]], version: int, run_id: str
    ) -> None:
        """Run tasks concurrently, and store the rows of each when its rollouts are finished."""
        context = self._context
        # Without the explorer's operators, which may filter: an evaluation counts all its rollouts.
        writer = RolloutWriter(context.job.store, Chain(()), lineage_id=run_id)

        async def one(index: int, task: Task) -> None:
            request = GroupRequest(task=task, batch=version, index=index, evaluation_id=run_id)
            rows = await pool.run_group(request)
            await writer.add([labeled(row, task.split) for row in rows])

        pending = {asyncio.create_task(one(index, task)) for index, task in tasks}
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                if context.stop.is_set():
                    raise JobError(f"the run was stopped while version {version} was evaluated")
                context.watch.check("train")
        finally:
            for task in pending:
                task.cancel()

    def _complete_ids(self) -> Collection[str]:
        """Return the evaluations whose rollouts are all stored."""
        rows = self._job.store.sql(
            "SELECT run_id FROM experiences WHERE purpose = 'eval' "
            f"GROUP BY run_id HAVING count(DISTINCT task_id) = {len(self._tasks)}"
        ).fetchall()
        return {run_id for (run_id,) in rows}

    def _stored(self, run_id: str) -> Collection[str]:
        """Return the tasks whose rollouts are stored."""
        rows = self._job.store.sql(
            f"SELECT DISTINCT task_id FROM experiences WHERE run_id = {literal(run_id)}"
        ).fetchall()
        return {task for (task,) in rows}

    def _found(self, weights: PublishedWeights, run_id: str) -> Evaluation:
        store, seed = self._job.store, self._context.config.seed
        one = EvaluatedPolicy(version=weights.version, weights=weights)
        return evaluation(
            self._settings, self._tasks, one, run_id, rollout_scores(store, run_id), seed=seed
        )

    def _are_available(self, weights: PublishedWeights) -> bool:
        newest = self._context.subscriber.latest()
        sends = newest is not None and weights.address == newest.address is not None
        return weights.state is not None or sends or weights.file.is_file()
