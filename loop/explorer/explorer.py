"""The producer: runs groups with the weights that the schedule allows, and stores their rows."""

import asyncio
import gc
import threading
from contextlib import AbstractContextManager, nullcontext

from ...store.errors import JobError
from ..algorithms import Algorithm
from ..models.threads import use_threads
from ..runs.job import Job, recorded
from ..runs.metrics import Listener
from ..tasks.curriculum import Curriculum
from ..weight_sync import WeightCache
from .batched import BatchedExploration
from .context import ExploreContext
from .live_eval import LiveEvaluation
from .streaming import StreamingExploration


class Explorer:
    """Makes the rows that training steps draw, with weights that are new enough for each."""

    def __init__(
        self,
        job: Job,
        algorithm: Algorithm,
        *,
        stop: threading.Event | None = None,
        listener: Listener | None = None,
        cache: WeightCache | None = None,
    ) -> None:
        self._job, self._algorithm = job, algorithm
        self._stop, self._listener, self._cache = stop or threading.Event(), listener, cache

    def run(self) -> None:
        """Explore until the rows of the last training step are stored.

        Raises JobError if too many batches fail, or the trainer does, and StarvedError if weights
        that are due are not published in time.
        """
        use_threads(self._job.config)
        context = ExploreContext(
            self._job, self._algorithm, stop=self._stop, listener=self._listener, cache=self._cache
        )
        # What earlier attempts stored counts, so a resumed run continues where it was.
        context.pace()
        first = context.first_batch()
        with recorded(self._job, start_step=first), context.metrics.shown(start_step=first):
            context.curriculum = Curriculum(
                self._job, batch_size=context.batch_tasks, group_size=self._algorithm.group_size
            )
            with _evaluating(context):
                asyncio.run(_explore(context, first))
            context.metrics.flush()


def _evaluating(context: ExploreContext) -> AbstractContextManager[None]:
    evaluate = context.config.evaluate
    if evaluate is None or evaluate.every_steps is None:
        return nullcontext()
    live = LiveEvaluation(context)
    context.evaluate_until = live.until
    return live.on_record()


async def _explore(context: ExploreContext, first: int) -> None:
    strategy = StreamingExploration if context.config.schedule.streaming else BatchedExploration
    try:
        batch = await strategy(context).explore(first)
        if context.stop.is_set() and context.pacer.step <= context.steps:
            raise JobError(f"the run was stopped before batch {batch} was stored")
        # The last versions are published only after the last rows are stored.
        await context.evaluate_until(context.steps)
    finally:
        # Or a process that runs several jobs would never free the objects of this one.
        gc.unfreeze()
        if context.pool is not None:
            await context.pool.close()
    await asyncio.to_thread(context.curriculum.finish, until=batch)
