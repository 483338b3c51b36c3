"""Start the processes of a training: on this machine, on Ray, or as torchrun started them."""

import atexit
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ....store.errors import ConfigError, JobError
from ...algorithms import resolve
from ...config import RunConfig
from .fitting import check_models
from .join import Terms, joined, joined_process, joined_torchrun, missing_variables, under_torchrun
from .processes import END_SECONDS, Local, OnRay, WorkerProcesses
from .world import MultiProcess, SingleProcess


def is_other_rank() -> bool:
    """Return whether this process is a rank other than 0."""
    return under_torchrun() and int(os.environ["RANK"]) > 0


@contextmanager
def launched(config: RunConfig, *, stop: threading.Event) -> Iterator[SingleProcess]:
    """Start the other processes, yield rank 0's world, and end them afterwards.

    `stop` is set when one of them ends too early. Raises ConfigError if the configuration does not
    fit how this process was started, or its models.
    """
    parallel = config.trainer.distributed
    check_models(config, resolve(config.algorithm))
    if under_torchrun():
        yield _found(config)
        return
    if parallel.launcher == "torchrun":
        raise ConfigError(
            f"`trainer.distributed.launcher` is torchrun, and {missing_variables()} not set: start "
            "with `torchrun --nproc-per-node 2 -m rlake.loop.cli train CONFIG`, or set it to local"
        )
    size = parallel.world_size or 1
    terms = Terms.of(config, size=size)
    if size == 1:
        yield SingleProcess()
        return
    others = OnRay(terms) if parallel.launcher == "ray" else Local(terms)
    with _started(terms, others, stop) as world:
        yield world


def _found(config: RunConfig) -> SingleProcess:
    """Join the processes that torchrun started; the others leave when rank 0 exits."""
    asked, size = config.trainer.distributed.world_size, int(os.environ["WORLD_SIZE"])
    if asked not in (None, size):
        raise ConfigError(
            f"`trainer.distributed.world_size` is {asked}, and torchrun started {size} processes; "
            "leave it out"
        )
    # Once per process: a process group cannot be joined a second time, as by a second stage.
    if not joined_process:
        world = joined_torchrun(Terms.of(config, size=size))
        atexit.register(_part, world)
        # torchrun ends all processes by SIGTERM when one of them fails: say which one it was.
        signal.signal(signal.SIGTERM, _ended_by_torchrun)
    return joined_process[0]


def _part(world: MultiProcess) -> None:
    with suppress(Exception):
        world.broadcast_call("leave", ())


def _ended_by_torchrun(number: int, frame: FrameType | None) -> None:
    del number, frame
    reason = joined_process[0].failure() if joined_process else None
    raise JobError(reason or "this process received SIGTERM")


@contextmanager
def _started(
    terms: Terms, others: WorkerProcesses, stop: threading.Event
) -> Iterator[SingleProcess]:
    """Start the other processes, join them, and watch them."""
    store = TCPStore(
        others.host,
        0,  # any port that is free
        terms.size,
        is_master=True,
        timeout=timedelta(seconds=terms.seconds),
        wait_for_workers=False,  # they start below, and need the port that is chosen here
    )
    watch = ProcessWatcher(others, terms, stop)
    others.start(store.port)
    watch.start()
    seconds = 2.0  # after a failure, the others have nothing to finish
    try:
        try:
            world = joined(terms, store, rank=0, local_rank=0)
        except RuntimeError as error:
            raise JobError(watch.reason() or f"the processes did not join: {error}") from error
        world.watched = watch.reason
        yield world
        world.broadcast_call("leave", ())
        seconds = END_SECONDS
    finally:
        # Before they end: from here on the watcher must not report an exit as a failure.
        watch.is_over = True
        others.end(seconds=seconds)
        if dist.is_initialized():
            dist.destroy_process_group()


class ProcessWatcher:
    """Waits in one thread per process for the other processes to end."""

    def __init__(self, others: WorkerProcesses, terms: Terms, stop: threading.Event) -> None:
        self._others, self._size, self._stop = others, terms.size, stop
        self._reason: str | None = None
        self._ended = threading.Event()
        self.is_over = False

    def start(self) -> None:
        """Watch each process in a thread."""
        for rank in range(1, self._size):
            threading.Thread(target=self._wait, args=(rank,), daemon=True).start()

    def reason(self) -> str | None:
        """Return why the first of them ended too early; waits until that would be known."""
        self._ended.wait(self._others.notice_seconds)
        return self._reason

    def _wait(self, rank: int) -> None:
        message = self._others.wait(rank)
        if message is None or self.is_over or self._ended.is_set():
            return
        self._reason = f"process {rank} of {self._size} {message}"
        self._ended.set()
        self._stop.set()
