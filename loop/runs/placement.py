"""A trainer placed by Ray, which shares only the store with the process that started it."""

import sys
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from ...store import Store, connect
from ...store.errors import JobError
from ..config import RunConfig
from .placement_group import reserved
from .ray import connected, last_line

LOOK_SECONDS = 0.2
"""Seconds between two checks whether the trainer began or the run was stopped."""
STOP_SECONDS = 10.0
"""Seconds that the trainer has to end after the run was stopped."""


def train_placed(
    train: Callable[..., None],
    store: Store,
    config: RunConfig,
    *,
    resume: bool,
    stop: threading.Event,
    ready: Callable[[], None],
) -> None:
    """Call `train` on the cluster and raise what it raises; JobError if its process dies.

    `ready` is called when its attempt is recorded.
    """
    assert config.ray is not None
    assert config.ray.trainer is not None, "the configuration places the trainer"
    before = _attempts(store, config)
    with connected(config.ray) as ray, reserved(config, trainer=True) as room:
        # No retries by Ray: without `resume` a second start is refused. The process ends with its
        # call, which frees the GPU.
        work = ray.remote(max_retries=0, max_calls=1)(_train)
        paths = [path for path in sys.path if path]  # user modules may be importable only from here
        placed = work.options(**room.of_trainer(config.ray.trainer)).remote(
            train, store.uri, store.storage_options, config, resume, paths
        )
        is_ready, deadline = False, float("inf")
        while not ray.wait([placed], timeout=LOOK_SECONDS)[0]:
            if not is_ready and _attempts(store, config) > before:
                is_ready = True
                ready()
            if stop.is_set():
                deadline = min(deadline, perf_counter() + STOP_SECONDS)
            if perf_counter() > deadline:
                ray.cancel(placed, force=True)
                raise JobError("the run was stopped")
        _result(ray, placed)


def _result(ray: Any, placed: Any) -> None:
    try:
        ray.get(placed)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise JobError(f"the trainer failed: {last_line(error)}") from error
    except ray.exceptions.RayError as error:
        raise JobError(f"the trainer's process died: {last_line(error)}") from error


def _attempts(store: Store, config: RunConfig) -> int:
    [(attempt,)] = store.sql(
        "SELECT coalesce(max(attempt), 0) FROM job_events "
        f"WHERE run_id = '{config.name}' AND job = 'train'"
    ).fetchall()
    return attempt


def _train(
    train: Callable[..., None],
    uri: str,
    storage_options: dict[str, str] | None,
    config: RunConfig,
    resume: bool,  # noqa: FBT001 - calls to Ray travel with positions
    paths: list[str],
) -> None:
    sys.path.extend(path for path in paths if path not in sys.path)
    train(connect(uri, create=False, storage_options=storage_options), config, resume=resume)
