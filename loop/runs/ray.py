"""Connections to a Ray cluster, its resources, and the answers of actors."""

import asyncio
import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...store.errors import JobError, message_of, missing_extra
from ..config import PlaceConfig, RayConfig
from .job import WorkerLostError

NAMESPACE = "rlake"
"""Namespace of a run's named actor."""


def ray_module() -> Any:
    """Import Ray; MissingExtraError if it is not installed."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError as error:
        raise missing_extra(error.name or "ray", "ray") from error
    return ray


@contextmanager
def connected(config: RayConfig, *, starts: bool = True) -> Iterator[Any]:
    """Connect to the cluster, or use the connection of this process and leave it open.

    A connection made here is closed by its last user. Raises JobError if the cluster cannot be
    reached or, with `starts` false, if it would have to be started.
    """
    ray = ray_module()
    is_ours = _connection.join(ray, config.address, starts=starts)
    try:
        yield ray
    finally:
        if is_ours:
            _connection.leave(ray)


class _Connection:
    """The connection that was made here, with the number of its users in this process."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0

    def join(self, ray: Any, address: str, *, starts: bool) -> bool:
        """Use or make the connection; False if this process has one that was not made here."""
        with self._lock:
            if not ray.is_initialized():
                connect(ray, address, starts=starts)
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


def connect(ray: Any, address: str, *, starts: bool) -> None:
    """Connect to the cluster, or start one if `starts`; JobError if that fails."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    given = address if address not in ("auto", "local") else None
    with warnings.catch_warnings(), _same_handler(signal.SIGTERM):
        # Ray starts programs of its own; none of them continues in a fork of this process.
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
            raise JobError(
                f"cannot reach a Ray cluster at `{address}`: {message_of(error)}"
            ) from error


@contextmanager
def _same_handler(number: signal.Signals) -> Iterator[None]:
    """Keep the program's own handler of a signal, which Ray would replace by its own."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        # Another thread can set no handler, so Ray has set none there. Without one of the
        # program's, Ray's is better than none: it ends what Ray started.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and before not in (None, signal.SIG_DFL):
            signal.signal(number, before)


def options(place: PlaceConfig) -> dict[str, Any]:
    """Return the resources of an actor as options of Ray."""
    return {
        "num_cpus": place.cpus,
        "num_gpus": place.gpus,
        "resources": dict(place.resources) or None,
    }


def wanted(place: PlaceConfig) -> str:
    """Return the resources that an actor needs and those that are free, as text."""
    ray = ray_module()
    free = {n: v for n, v in ray.available_resources().items() if not n.startswith("node:")}
    left = ", ".join(
        f"{name} {value:g}" for name, value in sorted(free.items()) if "memory" not in name
    )
    asked = {"CPU": place.cpus, "GPU": place.gpus, **place.resources}
    each = ", ".join(f"{name} {value:g}" for name, value in asked.items() if value)
    return f"each takes {each or 'nothing'}; the cluster has {left or 'nothing'} left"


def here() -> Any:
    """Return the scheduling strategy of what ends with this process's node, and not with others."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray_module().get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node, soft=False)


async def answer(reference: Any, name: str) -> Any:
    """Return what an actor answers. Raises WorkerLostError if it died, or else its error."""
    ray = ray_module()
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)  # else the actor would finish the call for nobody
        raise
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception):
            raise cause from None
        raise JobError(f"`{name}` failed: {last_line(error)}") from error
    except ray.exceptions.RayError as error:
        raise WorkerLostError(f"`{name}` died: {last_line(error)}") from error


def end(actor: Any) -> None:
    """Kill an actor; without a connection to its cluster it has ended already."""
    ray = ray_module()
    if ray.is_initialized():  # else Ray would connect again
        ray.kill(actor)


def last_line(error: BaseException) -> str:
    """Return the last line of Ray's message, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
