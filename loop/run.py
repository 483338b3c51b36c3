"""The jobs of a run: explorer and trainer in one process, or each in its own.

Either way they share only the store: the trainer draws the rows that the explorer appends.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..pipelines import Table
from ..pipelines.expectations import bind
from ..pipelines.inline import explorer_chain, trainer_chain
from ..pipelines.source import schema
from ..store import Store, interrupts
from ..store.errors import ConfigError
from .algorithms import Algorithm, resolve
from .config import ExplorerConfig, RunConfig
from .evaluation.tasks import check_evaluation
from .explorer.explorer import Explorer
from .inference.policy import PROCESSING
from .inference.tinker_engine import refused_sampling
from .losses.policy_gradient import compares
from .models.threads import threads_restored
from .rollouts.group import workflow_of
from .rollouts.setup import sampling, used_functions
from .runs.job import OtherJobError, job
from .runs.metrics import Listener
from .runs.trackers import resolve as resolve_tracker
from .tasks.prepare import check as check_data
from .tasks.prepare import check_mixture, check_tasks, prepare
from .trainer.distributed.launch import launched
from .trainer.networks import check_teacher
from .trainer.preferences import check as check_preferences
from .trainer.tinker_backend import check_served
from .trainer.trainer import Trainer
from .trajectories.rewards import rewards_of
from .weight_sync import WeightCache
from .weight_sync.run_models import resolve_run_models

JOIN_SECONDS = 10.0
"""Seconds that a failed run waits for the explorer to stop."""

_log = logging.getLogger(__name__)


def run(
    store: Store, config: RunConfig, *, resume: bool = False, listener: Listener | None = None
) -> None:
    """Run all jobs of a configuration to the last training step, in this process.

    An explorer runs in a second thread; a failure of either job ends both, and is raised. With
    `resume`, continue where a killed run stopped.
    """
    if config.explorer is None:
        train(store, config, resume=resume, listener=listener)
        return
    config = _prepared(store, config)
    # Before a job is recorded, so that the run's name is free once the condition is fixed. An
    # explorer in its own process records its failure, which ends the trainer that waits for it.
    check_tasks(store, config.tasks.where)
    stop, cache = threading.Event(), WeightCache()
    explorer = BackgroundJob(
        lambda: _explore(store, config, resume=resume, stop=stop, listener=listener, cache=cache),
        stop,
    )
    with _on_cluster(config):
        try:
            if config.ray is not None and config.ray.trainer is not None:
                from .runs.placement import train_placed

                train_placed(_train, store, config, resume=resume, stop=stop, ready=explorer.start)
            else:
                _train(
                    store,
                    config,
                    resume=resume,
                    stop=stop,
                    listener=listener,
                    ready=explorer.start,
                    cache=cache,
                )
            # Without a limit: it may still evaluate the last versions.
            explorer.join()
        except BaseException as error:
            with interrupts.passed_on(error):
                stop.set()  # else the explorer would sample on, and the join below time out
                explorer.join(seconds=JOIN_SECONDS)
            if explorer.first:
                explorer.raise_error()  # the trainer's own error is only that it was stopped
            raise
        explorer.raise_error()


def _on_cluster(config: RunConfig) -> AbstractContextManager[Any]:
    """Keep the run's place on its cluster, if it has one, until both jobs have ended."""
    if config.ray is None:
        return nullcontext()
    from .runs.placement_group import placed

    return placed(config)


def check(config: RunConfig) -> None:
    """Look up every name in a configuration, before any work; ConfigError for an unknown one."""
    check_data(config)
    for tracker in config.trackers:
        resolve_tracker(tracker)
    algorithm = resolve(config.algorithm)
    check_preferences(config, algorithm)
    check_teacher(config, algorithm)
    check_served(config, algorithm)
    for table, expected in config.expect:
        bind(expected, schema(Table(table)), f"expect.{table}")
    credit = algorithm.advantage()
    trainer_chain(
        config.trainer.operators,
        config.trainer.side_columns,
        credit=credit,
        grouped=algorithm.grouped,
    )
    _check_functions(config)
    if config.explorer is not None:
        explorer_chain(config.explorer.operators)
        if config.explorer.engine.vllm is not None:
            from .inference.vllm_engine.arguments import check_heads

            check_heads(config.model, config.explorer.engine.vllm)
        weighs = "logprobs" in algorithm.needs and config.trainer.missing_logprobs == "refuse"
        if weighs and config.explorer.engine.endpoint is not None:
            raise ConfigError(
                "`explorer.engine` is an endpoint, which samples from a different policy, and the "
                "algorithm needs log-probs of the trained one; use an imitation or preference "
                "algorithm (sft, raft, kto), or another engine"
            )
        for key, section in config.explorers.items():
            _check_rollouts(key, section, algorithm)


def _check_functions(config: RunConfig) -> None:
    """Raise ConfigError, with its key, for a workflow or reward that does not exist or fit."""
    explorer = {} if config.explorer is None else {"explorer": config.explorer}
    for key, section in (explorer | config.explorers | config.evaluations).items():
        try:
            workflow_of(section.workflow, section.auxiliary_models)
            rewards_of(section.rewards)
            if section.engine.tinker is not None and (why := refused_sampling(section.sampling)):
                raise ConfigError(f"`sampling`: {why}")
        except ConfigError as error:
            raise ConfigError(f"`{key}`: {error}") from error


def _check_rollouts(key: str, section: ExplorerConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for rollouts that an algorithm cannot learn from."""
    if "logprobs" in algorithm.needs and section.sampling.temperature == 0:
        raise ConfigError(
            f"`{key}.sampling.temperature` is 0: all rollouts of a task would be equal; "
            "set it above 0"
        )
    num_rollouts = section.group_size or algorithm.group_size
    if num_rollouts == 1 and section.workflow == "single_turn" and compares(algorithm):
        raise ConfigError(
            "each task has one rollout, and the algorithm compares the rollouts of a task, so "
            f"it would learn nothing from rewards; set `{key}.group_size` above 1"
        )


def explore(
    store: Store,
    config: RunConfig,
    *,
    resume: bool = False,
    stop: threading.Event | None = None,
    listener: Listener | None = None,
) -> None:
    """Generate the experiences of a run, paced by the weights that its trainer publishes."""
    config = _prepared(store, config)
    with threads_restored():
        _explore(store, config, resume=resume, stop=stop, listener=listener)


def _prepared(store: Store, config: RunConfig) -> RunConfig:
    """Check a configuration, store its tasks, and return it with the models of other runs found."""
    if config.explorer is None:
        raise ConfigError("the configuration has no `explorer` section; `rlake train` runs it")
    check(config)
    _warn_of_truncation(config)
    config = resolve_run_models(store, config)
    prepare(store, config)
    check_mixture(store, config.tasks)
    check_evaluation(store, config)
    return config


def _explore(
    store: Store,
    config: RunConfig,
    *,
    resume: bool,
    stop: threading.Event | None,
    listener: Listener | None,
    cache: WeightCache | None = None,
) -> None:
    """Explore; `cache` holds the weights of a trainer in this process."""
    functions = used_functions(config, "explore")
    with job(store, config, "explore", resume=resume, functions=functions) as mine:
        Explorer(mine, resolve(config.algorithm), stop=stop, listener=listener, cache=cache).run()


def _warn_of_truncation(config: RunConfig) -> None:
    assert config.explorer is not None, "only what explores samples"
    if resolve(config.algorithm).likelihoods_at is not None:
        return
    chosen = [sampling(section.sampling) for section in config.explorers.values()]
    columns = [one.columns for one in chosen]
    cuts = dict.fromkeys(
        f"{name} {one[name]}"
        for one in columns
        for name in ("top_p", "top_k", "min_p")
        if one[name]
    )
    changes = dict.fromkeys(
        f"{name} {one.others[name]}" for one in chosen for name in PROCESSING if name in one.others
    )
    if changes:
        _log.warning(
            "`explorer.sampling` changes the logits (%s), and ratios, which are of the model's own "
            "distribution, do not correct for that, so the policy gradient is biased; sample "
            "without these settings for an unbiased estimate",
            ", ".join(changes),
        )
    if cuts:
        _log.warning(
            "`explorer.sampling` truncates (%s): tokens that are left out are never sampled, and "
            "ratios, which are of the full distribution, do not correct for that, so the policy "
            "gradient is biased (DeepSeek-V3.2, arXiv:2512.02556, section 3.1, applies the mask in "
            "training too; rlake does not); sample without truncation for an unbiased estimate",
            ", ".join(cuts),
        )


def train(
    store: Store,
    config: RunConfig,
    *,
    resume: bool = False,
    stop: threading.Event | None = None,
    listener: Listener | None = None,
) -> None:
    """Train on rows of the store: those of the run's explorer, or, offline, stored ones."""
    check(config)
    config = resolve_run_models(store, config)
    if config.data.makes_rows:  # tasks alone are needed by the explorer only
        prepare(store, config)
    _train(store, config, resume=resume, stop=stop, listener=listener)


def _train(
    store: Store,
    config: RunConfig,
    *,
    resume: bool,
    stop: threading.Event | None = None,
    listener: Listener | None = None,
    ready: Callable[[], None] | None = None,
    cache: WeightCache | None = None,
) -> None:
    """Train; `ready` is called when the first weights are published, for an explorer to follow."""
    stop = stop or threading.Event()
    functions = used_functions(config, "train")
    with (
        threads_restored(),
        job(store, config, "train", resume=resume, functions=functions) as mine,
        launched(config, stop=stop) as world,
    ):
        algorithm = resolve(config.algorithm)
        trainer = Trainer(mine, algorithm, stop=stop, listener=listener, world=world, cache=cache)
        trainer.run(ready=ready)


@dataclass
class BackgroundJob:
    """A job in a thread, which sets `stop` for the other job when it fails."""

    work: Callable[[], None]
    stop: threading.Event
    error: BaseException | None = None
    first: bool = False
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self.thread = threading.Thread(target=self._run, name="explorer", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - `raise_error` raises it in another thread
            # What fails first is the reason; the other job only fails because of it.
            first = not self.stop.is_set() and not isinstance(error, OtherJobError)
            self.error, self.first = error, first
            self.stop.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread; after `seconds` it is left to end with the process."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                _log.warning("the explorer did not stop within %g s", seconds or 0.0)

    def raise_error(self) -> None:
        """Raise the error that ended the job, if any."""
        if self.error is not None:
            raise self.error
