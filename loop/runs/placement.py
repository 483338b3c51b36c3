"""A trainer placed by Ray, which shares only the store with the process that started it."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from ...store import Store, connect, interrupts
from ...store.errors import JobError
from ..config import RunConfig
from .job import record_interrupted
from .placement_group import is_restarted, reserved
from .ray import connected, last_line

LOOK_SECONDS = 0.2
"""Seconds between two checks whether the trainer began or the run was stopped."""
STOP_SECONDS = 10.0
"""Seconds that the trainer has to end after the run was stopped."""

_log = logging.getLogger(__name__)


def train_placed(
    train: Callable[..., None],
    store: Store,
    config: RunConfig,
    *,
    resume: bool,
    stop: threading.Event,
    ready: Callable[[], None],
) -> None:
    """Call `train` on the cluster and raise what it raises.

    A trainer that dies, as with its node, is started again and resumes from its newest checkpoint.
    `ready` is called once, when its attempt is recorded. Raises JobError if it dies too often, or
    finds no place in time.
    """
    cluster = config.ray
    assert cluster is not None
    assert cluster.trainer is not None, "the configuration places the trainer"
    before = _attempts(store, config)
    is_ready = False

    def look() -> None:
        nonlocal is_ready
        if not is_ready and _attempts(store, config) > before:
            is_ready = True
            ready()

    paths = [path for path in sys.path if path]  # user modules may be importable only from here
    # The record first: when it is written, the process that is placed has been killed.
    with (
        _recorded(store, config, before),
        connected(cluster) as ray,
        reserved(config, trainer=True) as room,
    ):
        options = room.of_trainer(cluster.trainer)
        # No retries by Ray: without `resume` a second start is refused. The process ends with its
        # call, which frees the GPU.
        work = ray.remote(max_retries=0, max_calls=1)(_train).options(**options)
        deaths = 0
        while True:
            try:
                if deaths:
                    # Only a call that starts at once shows that the trainer would be placed.
                    place = ray.remote(max_retries=0)(_nothing).options(**options).remote()
                    if not _ended(ray, place, stop, seconds=cluster.startup_timeout):
                        raise JobError(
                            "no node has taken the trainer within `ray.startup_timeout`, "
                            f"{cluster.startup_timeout:g} s; {_WAY_OUT}"
                        )
                    _result(ray, place)
                args = (store.uri, store.storage_options, config, resume or is_ready, paths)
                placed = work.remote(train, *args)
                _ended(ray, placed, stop, look=look)
                return _result(ray, placed)
            except TrainerLostError as error:
                if stop.is_set():
                    raise
                look()  # it may have begun since the last one
                deaths += 1
                if deaths > cluster.max_restarts:
                    raise JobError(
                        f"{error}; it died {deaths} times, and `ray.max_restarts` is "
                        f"{cluster.max_restarts}; {_WAY_OUT}"
                    ) from error
                _log.warning("%s; it is started again, from its newest checkpoint", error)


@contextmanager
def _recorded(store: Store, config: RunConfig, before: int) -> Iterator[None]:
    """Record the attempt as interrupted if the block is: the trainer is killed without a word."""
    ended = threading.Lock()  # this thread and the one that handles signals may both get here

    def interrupted() -> None:
        if ended.acquire(blocking=False):
            record_interrupted(store, config.name, "train", after=before)

    try:
        with interrupts.last_words(interrupted):
            yield
    except BaseException as error:
        if interrupts.caused(error):
            interrupted()
        raise


class TrainerLostError(JobError):
    """The trainer's process died without an error of its own."""


_WAY_OUT = "continue with `--resume` (`resume=True` in Python)"


def _ended(
    ray: Any,
    placed: Any,
    stop: threading.Event,
    *,
    seconds: float = float("inf"),
    look: Callable[[], None] = lambda: None,
) -> bool:
    """Wait until a call has ended, and cancel it after `seconds` or if the run was stopped."""
    limit, deadline = perf_counter() + seconds, float("inf")
    while not ray.wait([placed], timeout=LOOK_SECONDS)[0]:
        look()
        if stop.is_set():
            deadline = min(deadline, perf_counter() + STOP_SECONDS)
        if perf_counter() > min(limit, deadline):
            ray.cancel(placed, force=True)
            if perf_counter() > deadline:
                raise JobError("the run was stopped")
            return False
    return True


def _result(ray: Any, placed: Any) -> None:
    try:
        ray.get(placed)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise JobError(f"the trainer failed: {last_line(error)}") from error
    except ray.exceptions.RayError as error:
        raise TrainerLostError(f"the trainer's process died: {last_line(error)}") from error


def _attempts(store: Store, config: RunConfig) -> int:
    [(attempt,)] = store.sql(
        "SELECT coalesce(max(attempt), 0) FROM job_events "
        f"WHERE run_id = '{config.name}' AND job = 'train'"
    ).fetchall()
    return attempt


def _nothing() -> None:
    """Start and end."""


def _train(
    train: Callable[..., None],
    uri: str,
    storage_options: dict[str, str] | None,
    config: RunConfig,
    resume: bool,  # noqa: FBT001 - calls to Ray travel with positions
    paths: list[str],
) -> None:
    # A node that is taken away terminates its processes first. An error of the trainer's own would
    # end the run; a process that dies is started again elsewhere.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    is_restarted.set()
    sys.path.extend(path for path in paths if path not in sys.path)
    train(connect(uri, create=False, storage_options=storage_options), config, resume=resume)
