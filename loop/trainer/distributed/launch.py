"""Starting the processes that train together: here, on Ray, or found as torchrun started them."""

import atexit
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import (
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ....store.errors import ConfigError, JobError
from ...config import RunConfig, check_shard
from .processes import END_SECONDS, Local, OnRay, Others
from .world import Processes, World

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_joined: list[Processes] = []
"""What this process is one of, when torchrun started it: for as long as it lives."""


@dataclass(frozen=True)
class Terms:
    """What every process must know to be one of several."""

    size: int
    shard: int | None
    device: str
    seconds: float
    idle_seconds: float
    """How long the first process may take between two calls, since it waits for rows."""

    @classmethod
    def of(cls, config: RunConfig, *, size: int) -> "Terms":
        """Return those of a run; raises ConfigError for what cannot be."""
        parallel = config.trainer.parallel
        try:
            check_shard(parallel.shard, size)
        except ValueError as error:
            raise ConfigError(f"`trainer.parallel`: {error}") from error
        if ":" in config.model.device:
            raise ConfigError(
                f"`model.device` is {config.model.device}, and {size} processes take a GPU each; "
                "set it to cuda"
            )
        device = config.model.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        wait = config.schedule.wait_seconds
        return cls(size, parallel.shard, device, parallel.timeout_seconds, wait)


def under_torchrun() -> bool:
    """Tell whether torchrun started this process, as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def follows() -> bool:
    """Tell whether this process is one of several, and not the first."""
    return under_torchrun() and int(os.environ["RANK"]) > 0


@contextmanager
def launched(config: RunConfig, *, stop: threading.Event) -> Iterator[World]:
    """Give the first process its world, with the others started, and ended at last.

    `stop` is set when one of them ends before it should. Raises ConfigError when what is
    configured and what is there do not fit.
    """
    parallel = config.trainer.parallel
    if under_torchrun():
        yield _found(config)
        return
    if parallel.launch == "torchrun":
        raise ConfigError(
            f"`trainer.parallel.launch` is torchrun, and {_missing()} not set: start with "
            "`torchrun --nproc-per-node 2 -m rlake.loop.cli train CONFIG`, or set it to local"
        )
    size = parallel.processes or 1
    if size == 1:
        yield World()
        return
    terms = Terms.of(config, size=size)
    others = OnRay(terms) if parallel.launch == "ray" else Local(terms)
    with _started(terms, others, stop) as world:
        yield world


def _missing() -> str:
    names = [name for name in TORCHRUN if name not in os.environ]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _found(config: RunConfig) -> World:
    """Join those that torchrun started; they part when the first process ends."""
    asked, size = config.trainer.parallel.processes, int(os.environ["WORLD_SIZE"])
    if asked not in (None, size):
        raise ConfigError(
            f"`trainer.parallel.processes` is {asked}, and torchrun started {size} processes; "
            "leave it out"
        )
    if not _joined:
        world = joined_torchrun(Terms.of(config, size=size))
        atexit.register(_part, world)
        signal.signal(signal.SIGTERM, _ended_by_torchrun)
    return _joined[0]


def _part(world: Processes) -> None:
    with suppress(Exception):
        world.tell("leave", ())


def _ended_by_torchrun(number: int, frame: FrameType | None) -> None:
    del number, frame
    reason = _joined[0].failure() if _joined else None
    raise JobError(reason or "this process was told to end (SIGTERM)")


def joined_torchrun(terms: Terms) -> Processes:
    """Join those that torchrun started; raises ConfigError when it did not say how."""
    absent = [name for name in TORCHRUN if name not in os.environ]
    if absent:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set as torchrun sets them, and {_missing()} not; start with "
            "torchrun, or unset them"
        )
    seconds = timedelta(seconds=terms.seconds)
    store, rank, _ = next(rendezvous("env://", timeout=seconds))
    _joined.append(joined(terms, store, rank=rank, local_rank=int(os.environ["LOCAL_RANK"])))
    return _joined[0]


def joined(terms: Terms, store: Store, *, rank: int, local_rank: int) -> Processes:
    """Become one of several processes that meet at a store."""
    backend = "gloo"
    if terms.device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {rank} has no GPU of its own: there are {torch.cuda.device_count()} "
                "here; lower `trainer.parallel.processes`, or set `model.device` to cpu"
            )
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=terms.size,
        timeout=timedelta(seconds=terms.seconds),
    )
    return Processes(
        store, shard=terms.shard, seconds=terms.seconds, idle_seconds=terms.idle_seconds
    )


@contextmanager
def _started(terms: Terms, others: Others, stop: threading.Event) -> Iterator[World]:
    """Start the others, join them, and watch over them."""
    store = TCPStore(
        others.host,
        0,  # any port that is free
        terms.size,
        is_master=True,
        timeout=timedelta(seconds=terms.seconds),
        wait_for_workers=False,
    )
    watch = _Watch(others, terms, stop)
    others.start(store.port)
    watch.start()
    seconds = 2.0  # after a failure nobody has anything to finish
    try:
        try:
            world = joined(terms, store, rank=0, local_rank=0)
        except RuntimeError as error:
            raise JobError(watch.reason() or f"the processes did not meet: {error}") from error
        world.watched = watch.reason
        yield world
        world.tell("leave", ())
        seconds = END_SECONDS
    finally:
        watch.is_over = True
        others.end(seconds=seconds)
        if dist.is_initialized():
            dist.destroy_process_group()


class _Watch:
    """A thread for each of the other processes, which waits for its end."""

    def __init__(self, others: Others, terms: Terms, stop: threading.Event) -> None:
        self._others, self._size, self._stop = others, terms.size, stop
        self._reason: str | None = None
        self._told = threading.Event()
        self.is_over = False

    def start(self) -> None:
        for rank in range(1, self._size):
            threading.Thread(target=self._wait, args=(rank,), daemon=True).start()

    def reason(self) -> str | None:
        """Say why the first of them ended that should not have; waits a moment for it."""
        self._told.wait(2.0)
        return self._reason

    def _wait(self, rank: int) -> None:
        message = self._others.wait(rank)
        if message is None or self.is_over or self._told.is_set():
            return
        self._reason = f"process {rank} of {self._size} {message}"
        self._told.set()
        self._stop.set()
