"""Reaching a Ray cluster, and asking what it has."""

import asyncio
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...store.errors import JobError, missing_extra
from ..config import PlaceConfig, RayConfig
from .job import WorkerLostError

NAMESPACE = "rlake"
"""Where a run's named actor is looked up."""


def ray_module() -> Any:
    """Import Ray, or say how to install it."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise missing_extra(error.name or "ray", "ray") from error
    return ray


@contextmanager
def connected(config: RayConfig, *, starts: bool = True) -> Iterator[Any]:
    """Be connected to the cluster; a connection that this process has is used, and left open.

    One that was made here ends with the last who uses it. Raises JobError when there is none, or
    with `starts` false when it would have to be started.
    """
    ray = ray_module()
    is_ours = _connection.join(ray, config.address, starts=starts)
    try:
        yield ray
    finally:
        if is_ours:
            _connection.leave(ray)


class _Connection:
    """The connection that was made here, for as long as somebody in this process uses it."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0

    def join(self, ray: Any, address: str, *, starts: bool) -> bool:
        """Use it, or make it; False when this process has one that is not ours."""
        with self._lock:
            if not ray.is_initialized():
                _connect(ray, address, starts=starts)
            elif self._users == 0:
                return False
            self._users += 1
            return True

    def leave(self, ray: Any) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                ray.shutdown()


_connection = _Connection()


def _connect(ray: Any, address: str, *, starts: bool) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    given = address if address not in ("auto", "local") else None
    with warnings.catch_warnings():
        # Ray starts its own programs; none of them goes on in a fork of this process
        warnings.filterwarnings("ignore", "lance is not fork-safe")
        try:
            if starts and given is None:
                ray.init(
                    address="local" if address == "local" else None,
                    include_dashboard=False,
                    **quiet,
                )
            else:
                ray.init(address=given or "auto", **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            message = " ".join(str(error).split())[:300]
            raise JobError(f"there is no Ray cluster at `{address}`: {message}") from error


def options(place: PlaceConfig) -> dict[str, Any]:
    """Return what an actor takes, in Ray's words."""
    return {
        "num_cpus": place.cpus,
        "num_gpus": place.gpus,
        "resources": dict(place.resources) or None,
    }


def wanted(place: PlaceConfig) -> str:
    """Say what an actor takes, and what the cluster has left."""
    ray = ray_module()
    free = {n: v for n, v in ray.available_resources().items() if not n.startswith("node:")}
    left = ", ".join(
        f"{name} {value:g}" for name, value in sorted(free.items()) if "memory" not in name
    )
    asked = {"CPU": place.cpus, "GPU": place.gpus, **place.resources}
    each = ", ".join(f"{name} {value:g}" for name, value in asked.items() if value)
    return f"each takes {each or 'nothing'}; the cluster has {left or 'nothing'} left"


async def answer(reference: Any, name: str) -> Any:
    """Return what an actor answers; LostRunnerError when it died, else what it raised."""
    ray = ray_module()
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception):
            raise cause from None
        raise JobError(f"`{name}` failed: {last_line(error)}") from error
    except ray.exceptions.RayError as error:
        raise WorkerLostError(f"`{name}` died: {last_line(error)}") from error


def end(actor: Any) -> None:
    """End an actor now; without a connection to its cluster it is over already."""
    ray = ray_module()
    if ray.is_initialized():  # else Ray would connect again
        ray.kill(actor)


def last_line(error: BaseException) -> str:
    """Return the line of Ray's message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
