"""The trainer's loop: take steps on drawn rows, publish weights, and write checkpoints."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch
from transformers import PreTrainedModel

from ...store.errors import ConfigError, JobError, nearest
from ...store.query import literal
from ..algorithms import Algorithm
from ..models.load import vocabulary
from ..models.lora import has_adapter
from ..models.threads import use_threads
from ..runs.job import Job, recorded
from ..runs.metrics import Listener, Metrics, evaluated_versions, waiting
from ..schedule.pacing import is_published
from ..weight_sync import WeightCache, published, publisher
from .data_loader import TrainDataLoader
from .distributed.world import SingleProcess
from .learner import learner
from .memory import check_memory
from .networks import build
from .numerics import NonFiniteRow
from .step import StepResult

_log = logging.getLogger(__name__)
_NO_GRADIENT = (
    "no step from %d to %d had a gradient, so nothing was learned: every advantage was 0, as when "
    "all rewards of a group are equal; `SELECT * FROM groups` shows them"
)


class Trainer:
    """Takes the steps of a run. Step s updates the weights of version s - 1 to version s."""

    def __init__(
        self,
        job: Job,
        algorithm: Algorithm,
        *,
        stop: threading.Event | None = None,
        listener: Listener | None = None,
        world: SingleProcess | None = None,
        cache: WeightCache | None = None,
    ) -> None:
        """`cache` holds weights for an explorer in this process."""
        config = job.config
        self._job, self._config, self._algorithm = job, config, algorithm
        self._stop, self._listener = stop or threading.Event(), listener
        self._world, self._cache = world or SingleProcess(), cache
        self._skipped = self._tokens = 0
        self._largest_grad_norm = 0.0
        self._measured: dict[str, float] = {}
        self.step = 0
        """Training steps taken, which is also the version of the weights."""

    def run(self, *, ready: Callable[[], None] | None = None) -> None:
        """Train to the last step, from the newest checkpoint if there is one.

        `ready` is called when the attempt is recorded and its first weights are published.
        """
        self._prepare()
        first = self._first = self.step + 1
        shown = self._metrics.shown(start_step=first)
        with recorded(self._job, start_step=first), shown, self._cleanup():
            self._feed.resume(self.step + 1)
            # After the attempt is recorded: versions that it will publish again no longer count.
            self._published = set(published(self._job.store, self._job.folder, self._job.run_id))
            if self.networks.served is not None:
                # A server need not have what an earlier attempt published there.
                self._published.discard(self.step)
            self._publish()
            # Only now: an explorer started earlier would wait for the first weights, and time out.
            if ready:
                ready()
            if self.step == 0:
                self._evaluate()
            while self.step < self.total_steps and not self._stop.is_set():
                self._advance()
                if (
                    self.step % self._config.trainer.checkpoint_every == 0
                    or self.step == self.total_steps
                ):
                    self._checkpoint()
            # `_cleanup` only waits: a write that failed has to be raised here, or the run would
            # count as done.
            self._learner.settled()
            self._metrics.flush()
            if self.step < self.total_steps:
                raise JobError(f"the run was stopped after step {self.step} of {self.total_steps}")
            # A run resumed after its last step takes none, which is not a lack of gradients.
            if first <= self.total_steps and not self._largest_grad_norm:
                _log.warning(_NO_GRADIENT, first, self.step)

    @contextmanager
    def _cleanup(self) -> Iterator[None]:
        """Name the process that failed first, and wait for background writes."""
        try:
            yield
        except Exception as error:
            # The watcher of the other processes sets `stop`: this error may be only a consequence.
            reason = self._world.failure() if self._stop.is_set() else None
            if reason is not None:
                raise JobError(reason) from error
            raise
        finally:
            self._checkpoints.settle()
            self._publisher.close()

    def _prepare(self) -> None:
        config = self._config
        use_threads(config)
        check_memory(config, self._algorithm)
        self.networks, self.tokenizer = build(config, self._algorithm)
        self.model = self.networks.policy
        self._feed = TrainDataLoader(
            self._job,
            self._algorithm,
            self.tokenizer,
            vocabulary=vocabulary(self.model),
            max_length=self.networks.max_length,
            images=self.networks.show(self._job.store),
            experts=self.networks.replayed_experts,
            stop=self._stop,
        )
        self.total_steps = self._feed.total_steps()
        self._learner = learner(
            config,
            self.networks,
            self.tokenizer,
            total_steps=self.total_steps,
            folder=self._job.folder / "checkpoints",
            world=self._world,
        )
        held_out = config.trainer.eval_where
        self._held_out = self._feed.held_out(held_out) if held_out else []
        self._checkpoints = self._learner.checkpoints
        self._publisher = publisher(self._job, self.tokenizer, self._cache)
        if has_adapter(self.model):
            # Refuses a base model that has changed, before the job is recorded.
            policy = self._learner.policy()
            assert isinstance(policy, PreTrainedModel), "a served policy has no adapter here"
            self._publisher.prepare(policy)
        self._metrics = Metrics(self._job)
        self._restore()

    def _restore(self) -> None:
        [(recorded,)] = self._job.store.sql(
            f"SELECT coalesce(max(step), 0) FROM draws WHERE run_id = '{self._job.run_id}'"
        ).fetchall()
        # A store restored to an earlier snapshot has no draws of later steps, so checkpoints of
        # these steps belong to a history that no longer exists.
        self._checkpoints.set_aside(after=recorded)
        steps = self._checkpoints.steps()
        if steps:
            self.step = int(self._learner.load(steps[-1])["step"])

    def _advance(self) -> None:
        """Take one step."""
        step = self.step + 1
        began = perf_counter()
        rows, measured = self._feed.next_batch(step)
        fed = perf_counter()
        self._checkpoints.check()  # else an error of the background writer shows up only later
        stepped = self._learner.step(rows)
        measured |= stepped.metrics
        self._check_best(measured)
        trained = perf_counter()
        self._feed.record_priorities(step, stepped.nll)
        norms = (measured.get(f"train/{name}", 0.0) for name in ("grad_norm", "logprob_grad_norm"))
        self._largest_grad_norm = max(self._largest_grad_norm, *norms)
        self._note_faults(stepped, step)
        if self._skipped >= self._config.trainer.max_nonfinite_steps:
            self._metrics.add(step, measured)
            raise _too_many(self._skipped, stepped.faults[0])
        self._tokens += 0 if stepped.faults else int(rows.tokens["mask"].sum())
        if step == self.total_steps and not self._tokens:
            self._metrics.add(step, measured)
            self._check_trained()
        # Before publishing: the weights that step s made are those of version s.
        self.step = step
        self._publish()
        ended = perf_counter()
        measured |= {
            "train/feed_seconds": fed - began,
            "train/step_seconds": trained - fed,
            "train/publish_seconds": ended - trained,
        }
        self._measured = measured
        self._metrics.add(step, measured)
        if self._listener:
            self._listener("train", step, measured)

    def _note_faults(self, stepped: StepResult, step: int) -> None:
        """Store the rows of a step that was skipped as non-finite, and count consecutive ones."""
        if not stepped.faults:
            self._skipped = 0
            return
        self._skipped += 1
        attempt = self._job.step_id(step)
        rows = [
            {
                "experience_id": fault.experience_id,
                "operator": "train",
                "error": fault.error,
                "lineage_id": attempt,
            }
            for fault in stepped.faults
        ]
        self._job.store.append("operator_errors", rows)

    def _check_trained(self) -> None:
        """Raise JobError if none of the rows that the run drew could be trained on."""
        run = literal(self._job.run_id)
        ask = self._job.store.sql
        [(drawn, before)] = ask(
            f"SELECT count(*), count(*) FILTER (weight > 0 AND step < {self._first}) "
            f"FROM draws_current WHERE run_id = {run}"
        ).fetchall()
        # An earlier attempt trained on rows, so the weights are not those that the run began with.
        if before:
            return
        of_run = f"starts_with(lineage_id, {run} || '/')"
        [(error, reason)] = ask(
            "SELECT (SELECT mode(error) FROM operator_errors "
            f"WHERE operator = 'train' AND {of_run}), "
            f"(SELECT mode(reason) FROM drops WHERE {of_run})"
        ).fetchall()
        why = error or reason or "none has a token with a credit that is trained on"
        raise JobError(
            f"nothing was trained on: none of the {drawn} drawn rows could be used, so the weights "
            f"are unchanged and the last version is not published; the most frequent reason: {why}"
        )

    def _publish(self) -> None:
        """Publish the weights when the schedule says so, and at the end."""
        due = is_published(self._config.schedule, self.step)
        if self._config.explorer is None:
            due = self.step == 0  # an offline run has no explorer that needs newer versions
        if not due and self.step != self.total_steps:
            return
        # A resumed run starts at a version that an earlier attempt has published.
        if self.step in self._published:
            return
        parent = max((v for v in self._published if v < self.step), default=None)
        origin = self._config.model
        run_id = None
        if parent is None and origin.run is not None:
            parent, run_id = origin.version, origin.run
        if self._config.explorer is not None and self._config.explorer.engine.sleeps:
            # The explorer's engine wakes up for the next version, and needs what the step had.
            torch.cuda.empty_cache()
        self._publisher.publish(
            self._learner.policy(), self.step, parent=parent, parent_run_id=run_id
        )
        self._published.add(self.step)

    def _checkpoint(self) -> None:
        """Write all that a resumed run needs, and remove what it does not."""
        self._evaluate()
        # Before the checkpoint: a run resumed from it does not repeat these steps, so metrics that
        # are still buffered would be lost.
        self._metrics.flush()
        facts = {
            "step": self.step,
            "run_id": self._job.run_id,
            "attempt": self._job.attempt,
            "metrics": self._measured,
        }
        # Before the checkpoint: a run resumed from it loads these versions from their folders.
        self._publisher.settle()
        self._checkpoints.update_metric(self._evaluated_later())
        # By the checkpoints before this one: a run killed now resumes from one of them.
        self._learner.settled()
        newest = self._checkpoints.steps()[-self._config.trainer.keep_checkpoints.last :]
        if newest:
            schedule = self._config.schedule
            # A run resumed from the oldest checkpoint still samples with weights this old.
            oldest = newest[0] - schedule.max_ahead - schedule.publish_every
            self._publisher.forget(before=oldest)
        self._learner.save(self.step, facts)
        self._job.store.maintain(only_due=True)

    def _evaluated_later(self) -> dict[int, float | None]:
        """Return the explorer's evaluations of the steps with checkpoints, if they choose the best.

        None: still to be evaluated.
        """
        best = self._config.trainer.keep_checkpoints.best
        if best is None or not self._config.evaluates(best):
            return {}
        store, steps = self._job.store, {*self._checkpoints.steps(), self.step}
        found = evaluated_versions(store, self._config.name, best)
        known = {step: found[step] for step in steps & found.keys()}
        return {**dict.fromkeys(waiting(store, self._config, steps)), **known}

    def _check_best(self, found: Mapping[str, float]) -> None:
        """Raise ConfigError if the best checkpoint is chosen by a metric that does not exist."""
        best = self._config.trainer.keep_checkpoints.best
        if best is not None and self._config.evaluates(best):
            return
        kind = best.partition("/")[0] if best else None
        alike = [name for name in found if name.partition("/")[0] == kind]
        # Without any metric of its kind nothing is known yet: held-out rows
        # are evaluated less often.
        if best is not None and alike and best not in found:
            raise ConfigError(
                f"`trainer.keep_checkpoints` names the metric `{best}`, which this run does not "
                f"have{nearest(best, alike)}; it has {', '.join(sorted(alike))}"
            )

    def _evaluate(self) -> None:
        """Evaluate the loss on held-out rows, if the run has some."""
        if self._held_out:
            found = self._learner.evaluate(self._held_out)
            values = {f"eval/{name}": value for name, value in found.items()}
            self._check_best(values)
            self._measured |= values
            self._metrics.add(self.step, values)
            if self._listener:
                self._listener("evaluate", self.step, values)


def _too_many(steps: int, last: NonFiniteRow) -> JobError:
    return JobError(
        f"{steps} steps in a row have a loss or gradient that is not finite; in the last, "
        f"`{last.experience_id}`: {last.error}; lower `trainer.learning_rate`, or look at the rows "
        "in the table `operator_errors`"
    )
