"""The jobs of a run: explorer and trainer together in one process, or each on its own.

Either way they share nothing but the store: the explorer's thread and the trainer's meet only in
the rows that one appends and the other draws.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ..pipelines.inline import explorer_chain, trainer_chain
from ..store import Store
from ..store.errors import ConfigError
from .algorithms import resolve
from .config import RunConfig
from .evaluation.tasks import check_measured
from .explorer.explorer import Explorer
from .losses.policy_gradient import compares
from .rollouts.group import workflow_of
from .rollouts.setup import sampling, used_functions
from .runs.job import OtherJobError, job
from .runs.metrics import Listener
from .runs.trackers import resolve as resolve_monitor
from .tasks.prepare import check as check_data
from .tasks.prepare import prepare
from .trainer.distributed.launch import launched
from .trainer.networks import check_teacher
from .trainer.preferences import check as check_preferences
from .trainer.trainer import Trainer
from .trajectories.rewards import rewards_of
from .weight_sync import WeightCache
from .weight_sync.run_models import resolve_run_models

JOIN_SECONDS = 10.0
"""How long a failed run waits for the explorer to notice."""

_log = logging.getLogger(__name__)


def run(
    store: Store, config: RunConfig, *, resume: bool = False, listener: Listener | None = None
) -> None:
    """Run all jobs of a configuration to the last training step, in this process.

    With an explorer, it works in a thread beside the trainer; a failure of either ends both, and
    is raised. With `resume`, go on where a killed run stopped.
    """
    check(config)
    config = resolve_run_models(store, config)
    if config.explorer is None:
        train(store, config, resume=resume, listener=listener)
        return
    prepare(store, config)
    check_measured(store, config)
    stop, shelf = threading.Event(), WeightCache()
    explorer = BackgroundJob(
        lambda: explore(store, config, resume=resume, stop=stop, listener=listener, shelf=shelf),
        stop,
    )
    with _on_cluster(config):
        try:
            if config.ray is not None and config.ray.trainer is not None:
                from .runs.placement import train_placed

                train_placed(train, store, config, resume=resume, stop=stop, ready=explorer.start)
            else:
                train(
                    store,
                    config,
                    resume=resume,
                    stop=stop,
                    listener=listener,
                    ready=explorer.start,
                    shelf=shelf,
                )
        except BaseException:
            stop.set()
            explorer.join(seconds=JOIN_SECONDS)
            if explorer.first:
                explorer.raise_error()  # the trainer only saw that it was stopped
            raise
        explorer.join()
        explorer.raise_error()


def _on_cluster(config: RunConfig) -> AbstractContextManager[Any]:
    """Stay connected to the run's cluster, if it has one, until both jobs have ended."""
    if config.ray is None:
        return nullcontext()
    from .runs.ray import connected

    return connected(config.ray)


def check(config: RunConfig) -> None:
    """Look up every name in a configuration, before any work; ConfigError for an unknown one."""
    check_data(config)
    for monitor in config.trackers:
        resolve_monitor(monitor)
    algorithm = resolve(config.algorithm)
    check_preferences(config, algorithm)
    check_teacher(config, algorithm)
    credit = algorithm.advantage()
    trainer_chain(
        config.trainer.operators,
        config.trainer.side_columns,
        credit=credit,
        grouped=algorithm.grouped,
    )
    if config.explorer is not None:
        workflow_of(config.explorer.workflow, config.explorer.auxiliary_models)
        rewards_of(config.explorer.rewards)
        explorer_chain(config.explorer.operators)
        weighs = "logprobs" in algorithm.needs and config.trainer.missing_logprobs == "refuse"
        if weighs and config.explorer.engine.endpoint is not None:
            raise ConfigError(
                "`explorer.engine` is an endpoint, whose rows another policy writes, and the "
                "algorithm weighs rows by their log-probs under the run's own; take one that "
                "imitates or compares (sft, raft, kto), or another engine"
            )
        if "logprobs" in algorithm.needs and config.explorer.sampling.temperature == 0:
            raise ConfigError(
                "`explorer.sampling.temperature` is 0: all tries at a task would be the same; "
                "set it above 0"
            )
        num_tries = config.explorer.group_size or algorithm.group_size
        single = config.explorer.workflow == "single_turn"
        if num_tries == 1 and single and compares(algorithm):
            raise ConfigError(
                "each task is tried once, and the algorithm compares the tries at a task: nothing "
                "would be learned from rewards; set `explorer.group_size` above 1"
            )


def explore(
    store: Store,
    config: RunConfig,
    *,
    resume: bool = False,
    stop: threading.Event | None = None,
    listener: Listener | None = None,
    shelf: WeightCache | None = None,
) -> None:
    """Make the experience of a run, paced by the weights that its trainer publishes.

    `shelf` is that of a trainer in this process.
    """
    if config.explorer is None:
        raise ConfigError("the configuration has no `explorer` section; `rlake train` runs it")
    check(config)
    _warn_of_truncation(config)
    config = resolve_run_models(store, config)
    prepare(store, config)
    check_measured(store, config)
    functions = used_functions(config, "explore")
    with job(store, config, "explore", resume=resume, functions=functions) as mine:
        Explorer(mine, resolve(config.algorithm), stop=stop, listener=listener, shelf=shelf).run()


def _warn_of_truncation(config: RunConfig) -> None:
    """Say once what truncated sampling means for an algorithm that weighs rows by log-probs."""
    assert config.explorer is not None, "only what explores samples"
    columns = sampling(config.explorer.sampling).columns
    cuts = [f"{name} {columns[name]}" for name in ("top_p", "top_k", "min_p") if columns[name]]
    if cuts and resolve(config.algorithm).likelihoods_at is None:
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
    ready: Callable[[], None] | None = None,
    shelf: WeightCache | None = None,
) -> None:
    """Train on rows of the store: those that the run's explorer makes, or those that are there."""
    check(config)
    config = resolve_run_models(store, config)
    if config.data.makes_rows:  # tasks alone are the explorer's affair
        prepare(store, config)
    stop = stop or threading.Event()
    functions = used_functions(config, "train")
    with (
        job(store, config, "train", resume=resume, functions=functions) as mine,
        launched(config, stop=stop) as world,
    ):
        algorithm = resolve(config.algorithm)
        trainer = Trainer(mine, algorithm, stop=stop, listener=listener, world=world, shelf=shelf)
        trainer.run(ready=ready)


@dataclass
class BackgroundJob:
    """A job in a thread of its own; when it fails it says so to the other."""

    work: Callable[[], None]
    stop: threading.Event
    error: BaseException | None = None
    first: bool = False
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the job in a thread of its own."""
        self.thread = threading.Thread(target=self._run, name="explorer", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for this one
            first = not self.stop.is_set() and not isinstance(error, OtherJobError)
            self.error, self.first = error, first
            self.stop.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end; after `seconds` the thread is left to end with the process."""
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                _log.warning("gave up waiting for the explorer's try after %g s", seconds or 0.0)

    def raise_error(self) -> None:
        """Raise what ended the job, if anything did."""
        if self.error is not None:
            raise self.error
