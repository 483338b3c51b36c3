"""The producer: asks which weights the next batch may use, tries its tasks, and stores the rows."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch

from ..store import Experience, Task
from ..store.errors import JobError
from ..store.sampling.index import Index
from .algorithms import Algorithm
from .chains import explored, explorers, record
from .config import SamplingConfig
from .curriculum import Curriculum
from .drawing import new_units, own_where
from .metrics import Metrics
from .models import load_folder, put
from .pacing import Pacer
from .policy import Sampling
from .rollouts import fitting, rewards_of, store_rows, try_tasks, workflow_of
from .runs import Job, Watch, recorded
from .transformers_policy import TransformersPolicy
from .weights import Follower, Published, load_into

STOP_SECONDS = 0.5
"""How soon tries under way notice that the run is stopped."""

Listener = Callable[[str, int, Mapping[str, float]], None]
"""Called as (job, step, metrics) after each batch and each step."""


class Explorer:
    """Makes the rows that the training steps will draw, each with the weights due to it."""

    def __init__(
        self,
        job: Job,
        algorithm: Algorithm,
        *,
        stop: threading.Event | None = None,
        listener: Listener | None = None,
    ) -> None:
        config = job.config
        assert config.explorer is not None, "an explorer has its section in the configuration"
        self._job, self._config, self._explorer = job, config, config.explorer
        self._stop, self._listener = stop or threading.Event(), listener
        self._group_size = config.explorer.group_size or algorithm.group_size
        per_group = 1 if algorithm.grouped else self._group_size
        self._batch_tasks = config.explorer.tasks_per_batch or -(
            -config.trainer.batch_size // per_group
        )
        self._pacer = self._new_pacer()
        self._workflow = workflow_of(config.explorer.workflow)
        self._rewards = rewards_of(config.explorer.rewards)
        self._chain = explorers(config.explorer.operators)
        self._index = Index(
            job.store,
            grouped=algorithm.grouped,
            where=own_where(config),
            run_id=job.run_id,
        )
        self._watch = Watch(job)
        self._follower = Follower(job, self._watch)
        self._policy: TransformersPolicy | None = None
        self._failed = 0

    def run(self) -> None:
        """Explore until the rows of the last training step are stored.

        Raises JobError when batch after batch fails, or the trainer does; StarvedError when the
        weights that are due do not come in time.
        """
        config = self._config
        if config.threads:
            torch.set_num_threads(config.threads)
        batch, place = self._recover()
        metrics = Metrics(self._job)
        with recorded(self._job, start_step=batch):
            curriculum = Curriculum(
                self._job, batch_size=self._batch_tasks, group_size=self._group_size
            )
            while self._pacer.step <= (config.trainer.steps or 0) and not self._stop.is_set():
                started = perf_counter()
                rows = self._explore(curriculum, batch, place)
                if self._stop.is_set():
                    break
                self._note(metrics, batch, rows, perf_counter() - started)
                batch, place = batch + 1, 0
            metrics.flush()
            if not self._stop.is_set():
                curriculum.finish(until=batch)
            if self._pacer.step <= (config.trainer.steps or 0):
                raise JobError(f"the run was stopped before batch {batch} was stored")

    def _explore(self, curriculum: Curriculum, batch: int, place: int) -> list[Experience]:
        """Try a batch's tasks from `place` on, and store them commit by commit."""
        tasks = list(enumerate(curriculum.batch(batch)))[place:]
        chunk = self._explorer.tasks_per_commit or self._batch_tasks
        rows: list[Experience] = []
        for start in range(0, len(tasks), chunk):
            made = self._try(tasks[start : start + chunk], batch)
            rows += self._store(made)
            self._pace()
        self._check(rows)
        return rows

    def _store(self, made: list[Experience]) -> list[Experience]:
        """Store the rows of finished groups as the operators leave them; return the run's own."""
        if not self._chain:
            return store_rows(self._job.store, made)
        rows, treated = explored(self._chain, fitting(made))
        record(self._job.store, treated, lineage_id=f"{self._job.run_id}/explore")
        return store_rows(self._job.store, rows)[: len(made)]

    def _try(self, tasks: Sequence[tuple[int, Task]], batch: int) -> list[Experience]:
        """Try tasks, unless the run is stopped meanwhile."""
        policy = self._follow(self._pacer.version)

        async def until_stopped() -> list[Experience]:
            tries = asyncio.create_task(
                try_tasks(
                    tasks,
                    policy,
                    workflow=self._workflow,
                    rewards=self._rewards,
                    group_size=self._group_size,
                    sampling=sampling(self._explorer.sampling),
                    seed=self._config.seed,
                    run_id=self._job.run_id,
                    step=batch,
                    try_seconds=self._explorer.try_seconds,
                )
            )
            while not (await asyncio.wait({tries}, timeout=STOP_SECONDS))[0]:
                if self._stop.is_set():
                    tries.cancel()
                    raise JobError(f"the run was stopped while batch {batch} was tried")
            return tries.result()

        return asyncio.run(until_stopped())

    def _new_pacer(self) -> Pacer:
        return Pacer(self._config.schedule, new_units=new_units(self._config))

    def _pace(self) -> None:
        """Tell the pacer what is stored and may be trained on, in the trainer's own order."""
        known = len(self._index)
        self._index.refresh()
        if self._index.rebuilt:  # `where` looks at other tables, and they changed
            self._pacer, known = self._new_pacer(), 0
        drawable = self._index.drawable[known:]
        self._pacer.stored(self._index.versions[known:][drawable].tolist())

    def _recover(self) -> tuple[int, int]:
        """Follow what this run stored before; return the batch and the place to go on from."""
        self._pace()
        rows = self._job.store.sql(
            "SELECT step, count(DISTINCT group_id) FROM experiences "
            f"WHERE run_id = '{self._job.run_id}' GROUP BY step ORDER BY step DESC LIMIT 1"
        ).fetchall()
        if not rows:
            return 1, 0
        batch, place = rows[0]
        return (batch, place) if place < self._batch_tasks else (batch + 1, 0)

    def _follow(self, version: int) -> TransformersPolicy:
        """Return the policy with the weights of `version`, waiting until they are published."""
        if self._policy is not None and self._policy.version == version:
            self._watch.check("train")  # what is made for a trainer that failed, nobody draws
            return self._policy
        weights = self._job.store.wait_for(
            lambda: self._look(version),
            tables=("policies", "runs"),
            seconds=self._config.schedule.wait_seconds,
            describe=lambda: (
                f"the explorer needs policy version {version} of run `{self._job.run_id}`, newest "
                f"is {self._follower.newest}; is `rlake train` running?"
            ),
            stop=self._stop,
        )
        if self._policy is None:
            model, tokenizer = load_folder(weights.folder, dtype=self._config.model.dtype)
            self._policy = TransformersPolicy(
                put(model, self._config.model.device),
                tokenizer,
                sampling=sampling(self._explorer.sampling),
            )
        load_into(self._policy.model, weights)
        self._policy.version = version
        return self._policy

    def _look(self, version: int) -> Published | None:
        found = self._follower.find(version)
        if found is None:
            self._watch.check("train")
        return found

    def _check(self, rows: list[Experience]) -> None:
        """End the job when batch after batch gives nothing that can be trained on."""
        usable = [row for row in rows if row.drop_reason is None]
        self._failed = 0 if usable else self._failed + 1
        if self._failed >= self._explorer.max_failed_batches:
            raise JobError(
                f"{self._failed} batches in a row gave no usable row; the last: "
                f"{rows[-1].drop_reason}"
            )

    def _note(self, metrics: Metrics, batch: int, rows: list[Experience], seconds: float) -> None:
        scored = [row.reward for row in rows if row.reward is not None]
        tokens = sum(s["num_tokens"] for row in rows for s in row.segments or ())
        values = {
            "explore/rows": float(len(rows)),
            "explore/failed_rows": float(sum(row.drop_reason is not None for row in rows)),
            "explore/unscored_rows": float(len(rows) - len(scored)),
            "explore/sampled_tokens": float(tokens),
            "explore/seconds": seconds,
        }
        if scored:
            values["explore/reward_mean"] = sum(scored) / len(scored)
        metrics.add(batch, values)
        if self._listener:
            self._listener("explore", batch, values)


def sampling(config: SamplingConfig) -> Sampling:
    """Return a configuration's way of sampling; the seed comes with each rollout."""
    return Sampling(temperature=config.temperature, max_tokens=config.max_tokens)
