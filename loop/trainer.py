"""The consumer: steps on rows that the feed gives it, publishes weights, and keeps checkpoints."""

import threading
from collections.abc import Callable
from time import perf_counter

import torch

from ..store.errors import JobError
from .algorithms import Algorithm
from .checkpoints import Checkpoints
from .explorer import Listener
from .feed import Feed
from .metrics import Metrics
from .models import load, max_length, pad_id, put, vocabulary
from .optimization import Optimization
from .runs import Job, recorded
from .weights import Publisher, published


class Trainer:
    """Takes the steps of a run. Step s updates the weights of version s - 1 to version s."""

    def __init__(
        self,
        job: Job,
        algorithm: Algorithm,
        *,
        stop: threading.Event | None = None,
        listener: Listener | None = None,
    ) -> None:
        config = job.config
        self._job, self._config, self._algorithm = job, config, algorithm
        self._stop, self._listener = stop or threading.Event(), listener
        self.step = 0
        """Optimizer steps taken: the version of the weights."""

    def run(self, *, ready: Callable[[], None] | None = None) -> None:
        """Train to the last step, from the newest checkpoint if there is one.

        `ready` is called when the attempt is on record and its first weights are published.
        """
        self._prepare()
        with recorded(self._job, start_step=self.step + 1):
            self._feed.resume(self.step + 1)
            self._published = set(published(self._job.store, self._job.folder, self._job.run_id))
            self._publish()
            if ready:
                ready()
            if self.step == 0:
                self._measure()
            while self.step < self.total_steps and not self._stop.is_set():
                self._advance()
                if (
                    self.step % self._config.trainer.checkpoint_every == 0
                    or self.step == self.total_steps
                ):
                    self._checkpoint()
            self._metrics.flush()
            if self.step < self.total_steps:
                raise JobError(f"the run was stopped after step {self.step} of {self.total_steps}")

    def _prepare(self) -> None:
        config = self._config
        if config.threads:
            torch.set_num_threads(config.threads)
        self.model, self.tokenizer = load(config.model, seed=config.seed)
        put(self.model, config.model.device)
        self._feed = Feed(
            self._job,
            self._algorithm,
            self.tokenizer,
            vocabulary=vocabulary(self.model),
            max_length=max_length(self.model),
            stop=self._stop,
        )
        self.total_steps = self._feed.total_steps()
        self._optimization = Optimization(
            self.model,
            self._algorithm,
            config.trainer,
            total_steps=self.total_steps,
            # greedy tries (0) have the log-probs of temperature 1
            temperature=(config.explorer.sampling.temperature if config.explorer else 1.0) or 1.0,
            pad_id=pad_id(self.tokenizer),
        )
        held_out = config.trainer.evaluate_loss_where
        self._held_out = self._feed.held_out(held_out) if held_out else []
        self._checkpoints = Checkpoints(
            self._job.folder / "checkpoints", keep=config.trainer.keep_checkpoints
        )
        self._publisher = Publisher(
            self._job.store,
            self._job.folder,
            run_id=self._job.run_id,
            attempt=self._job.attempt,
            tokenizer=self.tokenizer,
        )
        self._metrics = Metrics(self._job)
        self._restore()

    def _restore(self) -> None:
        [(recorded,)] = self._job.store.sql(
            f"SELECT coalesce(max(step), 0) FROM draws WHERE run_id = '{self._job.run_id}'"
        ).fetchall()
        self._checkpoints.set_aside(after=recorded)  # the store was restored to before them
        steps = self._checkpoints.steps()
        if steps:
            tensors, facts = self._checkpoints.read(steps[-1])
            self._optimization.load(tensors)
            torch.set_rng_state(tensors["rng"])
            self.step = int(facts["step"])

    def _advance(self) -> None:
        """Take one step."""
        step = self.step + 1
        began = perf_counter()
        rows, measured = self._feed.next(step)
        fed = perf_counter()
        stepped = self._optimization.step(rows)
        measured |= stepped.metrics
        trained = perf_counter()
        self._feed.learned(step, stepped.surprise)
        self.step = step
        self._publish()
        ended = perf_counter()
        measured |= {
            "train/feed_seconds": fed - began,
            "train/step_seconds": trained - fed,
            "train/publish_seconds": ended - trained,
        }
        self._metrics.add(step, measured)
        if self._listener:
            self._listener("train", step, measured)

    def _publish(self) -> None:
        """Publish the weights when the schedule says so, and at the end."""
        due = self.step % self._config.schedule.publish_every == 0
        if self._config.explorer is None:
            due = self.step == 0  # nobody follows an offline run
        if not due and self.step != self.total_steps:
            return
        if self.step in self._published:
            return
        parent = max((v for v in self._published if v < self.step), default=None)
        self._publisher.publish(self.model, self.step, parent=parent)
        self._published.add(self.step)

    def _checkpoint(self) -> None:
        """Store all that a resumed run needs, metrics first, and tidy up."""
        self._measure()
        self._metrics.flush()
        self._checkpoints.write(
            self.step,
            tensors={**self._optimization.state(), "rng": torch.get_rng_state()},
            facts={"step": self.step, "run_id": self._job.run_id, "attempt": self._job.attempt},
        )
        schedule = self._config.schedule
        oldest = self._checkpoints.steps()[0] - schedule.max_ahead - schedule.publish_every
        self._publisher.forget(before=oldest)
        self._job.store.maintain(only_due=True)

    def _measure(self) -> None:
        """Measure the loss on held-out rows, when the run names some."""
        if self._held_out:
            values = {"eval/loss": self._optimization.loss_on(self._held_out)}
            self._metrics.add(self.step, values)
            if self._listener:
                self._listener("evaluate", self.step, values)
