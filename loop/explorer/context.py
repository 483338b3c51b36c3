"""What the strategies of exploring share: pacing, tasks, workers, weights, and where rows go."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from ...pipelines.inline import explorer_chain
from ...store import Experience
from ...store.errors import JobError
from ...store.replay.row_index import Index
from ..algorithms import Algorithm
from ..rollouts.setup import trying
from ..rollouts.workers import WorkerPool
from ..rollouts.writer import RolloutWriter
from ..runs.job import Job, Watch
from ..runs.metrics import Listener, Metrics
from ..schedule.pacing import Pacer
from ..schedule.samplers import own_sides
from ..schedule.units import batch_tasks, new_units, order, own_where
from ..tasks.curriculum import Curriculum
from ..weight_sync import PublishedWeights, WeightCache, WeightSubscriber
from .workers import start_team


class ExploreContext:
    """The parts of one exploring job, which its strategy and its live evaluation work with."""

    curriculum: Curriculum
    """Set once the job is on record, so that what it raises is the job's failure."""

    def __init__(
        self,
        job: Job,
        algorithm: Algorithm,
        *,
        stop: threading.Event,
        listener: Listener | None,
        shelf: WeightCache | None,
    ) -> None:
        config = job.config
        assert config.explorer is not None, "an explorer has its section in the configuration"
        self.job, self.config, self.explorer = job, config, config.explorer
        self.stop, self._listener = stop, listener
        self.steps = config.trainer.steps or 0
        self.group_size = config.explorer.group_size or algorithm.group_size
        self.batch_tasks = batch_tasks(config, algorithm)
        self.units_per_group = 1 if algorithm.grouped else self.group_size
        self.pacer = self._new_pacer()
        self.watch = Watch(job)
        self.subscriber = WeightSubscriber(job, self.watch, shelf=shelf)
        self.metrics = Metrics(job)
        self.writer = RolloutWriter(
            job.store, explorer_chain(self.explorer.operators), lineage_id=f"{job.run_id}/explore"
        )
        self.evaluate_until: Callable[[int], Awaitable[None]] = _no_evaluation
        """Evaluates what is due up to a version; the workers may then have other weights."""
        self.is_evaluating = False
        """Whether the workers are to keep their weights, since these are being evaluated."""
        self.pool: WorkerPool | None = None
        """The workers, once they are started."""
        self._rollouts = trying(config, self.group_size, greedy_tries=algorithm.greedy_tries)
        self._index = Index(
            job.store,
            grouped=algorithm.grouped,
            where=own_where(config),
            sides=own_sides(config),
            run_id=job.run_id,
            order=order(config, algorithm),
        )
        self._useless = 0

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

    async def workers(self, folder: Path) -> WorkerPool:
        """Return the workers, which are started when there are weights for the first time."""
        if self.pool is None:
            self.pool = await start_team(self.job, self._rollouts, folder)
        return self.pool

    def _new_pacer(self) -> Pacer:
        return Pacer(self.config.schedule, new_units=new_units(self.config))

    def pace(self) -> None:
        """Tell the pacer what is stored and may be trained on, in the trainer's own order."""
        known = len(self._index)
        self._index.refresh()
        if self._index.rebuilt:  # `where` looks at other tables, and they changed
            self.pacer, known = self._new_pacer(), 0
        drawable = self._index.drawable[known:]
        self.pacer.stored(self._index.versions[known:][drawable].tolist())

    def first_batch(self) -> int:
        """Return the first batch of which not all groups are stored."""
        stored, whole = self.stored_places(), set(range(self.batch_tasks))
        batch = 1
        while whole <= set(stored.get(batch, ())):
            batch += 1
        return batch

    def stored_places(self) -> dict[int, dict[int, int]]:
        """Return which groups of which batches are stored, and the oldest version of each."""
        rows = self.job.store.sql(
            "SELECT step, regexp_extract(group_id, '/\\d{6,}/(\\d{4,})', 1)::INT, "
            "min(policy_version) "
            f"FROM experiences WHERE run_id = '{self.job.run_id}' AND parent_id IS NULL "
            "AND regexp_matches(group_id, '/\\d{6,}/\\d{4,}(/|$)') GROUP BY ALL"
        ).fetchall()
        found: dict[int, dict[int, int]] = {}
        for step, place, version in rows:
            found.setdefault(step, {})[place] = version
        return found

    def check(self, rows: Sequence[Experience]) -> None:
        """End the job when batch after batch gives nothing that can be trained on."""
        usable = [row for row in rows if row.drop_reason is None]
        self._useless = 0 if usable else self._useless + 1
        if self._useless >= self.explorer.max_failed_batches:
            raise JobError(
                f"{self._useless} batches in a row gave no usable row; the last: "
                f"{rows[-1].drop_reason}"
            )

    def note(self, batch: int, rows: Sequence[Experience], seconds: float) -> None:
        """Store the numbers of a batch."""
        values = measured(rows) | {"explore/seconds": seconds}
        self.metrics.add(batch, values)
        self.tell("explore", batch, values)

    def tell(self, job: str, step: int, values: Mapping[str, float]) -> None:
        """Let the listener know of numbers."""
        if self._listener:
            self._listener(job, step, values)


async def _no_evaluation(version: int) -> None:
    pass


def measured(rows: Sequence[Experience]) -> dict[str, float]:
    """Return what a batch's rows come to, greedy tries left out, and sums of what they counted."""
    tokens = sum(s["num_tokens"] for row in rows for s in row.segments or ())
    rows = [row for row in rows if "is_greedy" not in row.metrics]
    scored = [row.reward for row in rows if row.reward is not None]
    values = {
        "explore/rows": float(len(rows)),
        "explore/failed_rows": float(sum(row.drop_reason is not None for row in rows)),
        "explore/unscored_rows": float(len(rows) - len(scored)),
        "explore/sampled_tokens": float(tokens),
    }
    if scored:
        values["explore/reward_mean"] = sum(scored) / len(scored)
    reasons = Counter(row.finish_reason for row in rows if row.finish_reason)
    values |= {f"explore/finish/{name}": float(count) for name, count in reasons.items()}
    for name, value in (one for row in rows for one in row.metrics.items()):
        if name.startswith(("tools/", "environment/")):
            values[f"explore/{name}"] = values.get(f"explore/{name}", 0.0) + value
    return values
