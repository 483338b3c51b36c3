"""The jobs of a run: explorer and trainer together in one process, or each on its own.

Either way they share nothing but the store: the explorer's thread and the trainer's meet only in
the rows that one appends and the other draws.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..store import Store
from ..store.errors import ConfigError
from .algorithms import resolve
from .chains import explorers, trainers
from .config import RunConfig
from .explorer import Explorer, Listener
from .rollouts import rewards_of, workflow_of
from .runs import OtherJobError, job
from .tasks import prepare
from .trainer import Trainer

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
    if config.explorer is None:
        train(store, config, resume=resume, listener=listener)
        return
    prepare(store, config.tasks)
    stop = threading.Event()
    explorer = _Beside(
        lambda: explore(store, config, resume=resume, stop=stop, listener=listener), stop
    )
    try:
        train(store, config, resume=resume, stop=stop, listener=listener, ready=explorer.start)
    except BaseException:
        stop.set()
        explorer.join(seconds=JOIN_SECONDS)
        if explorer.first:
            explorer.raise_error()  # the trainer only saw that it was stopped
        raise
    explorer.join()
    explorer.raise_error()


def check(config: RunConfig) -> None:
    """Look up every name in a configuration, before any work; ConfigError for an unknown one."""
    algorithm = resolve(config.algorithm)
    credit = algorithm.advantage()
    trainers(config.trainer, credit=credit, grouped=algorithm.grouped)
    if config.explorer is not None:
        workflow_of(config.explorer.workflow)
        rewards_of(config.explorer.rewards)
        explorers(config.explorer.operators)
        if algorithm.needs_logprobs and config.explorer.sampling.temperature == 0:
            raise ConfigError(
                "`explorer.sampling.temperature` is 0: all tries at a task would be the same; "
                "set it above 0"
            )


def explore(
    store: Store,
    config: RunConfig,
    *,
    resume: bool = False,
    stop: threading.Event | None = None,
    listener: Listener | None = None,
) -> None:
    """Make the experience of a run, paced by the weights that its trainer publishes."""
    if config.explorer is None:
        raise ConfigError("the configuration has no `explorer` section; `rlake train` runs it")
    check(config)
    prepare(store, config.tasks)
    with job(store, config, "explore", resume=resume) as mine:
        Explorer(mine, resolve(config.algorithm), stop=stop, listener=listener).run()


def train(
    store: Store,
    config: RunConfig,
    *,
    resume: bool = False,
    stop: threading.Event | None = None,
    listener: Listener | None = None,
    ready: Callable[[], None] | None = None,
) -> None:
    """Train on rows of the store: those that the run's explorer makes, or those that are there."""
    check(config)
    with job(store, config, "train", resume=resume) as mine:
        Trainer(mine, resolve(config.algorithm), stop=stop, listener=listener).run(ready=ready)


@dataclass
class _Beside:
    """A job in a thread of its own; when it fails it says so to the other."""

    work: Callable[[], None]
    stop: threading.Event
    error: BaseException | None = None
    first: bool = False
    thread: threading.Thread | None = None

    def start(self) -> None:
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
        if self.error is not None:
            raise self.error
