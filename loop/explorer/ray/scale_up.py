"""Add explorers to a running Ray job: a registry actor takes requests and hands them to the run."""

import asyncio
from typing import Any

from ....store.errors import ConfigError, JobError
from ...config import RunConfig
from ...runs.ray import NAMESPACE, connected, last_line


def register_name(run_id: str) -> str:
    """Return the name of the registry actor of a run."""
    return f"run/{run_id}"


def join(config: RunConfig, *, explorers: int) -> int:
    """Add explorers to a run that is exploring on the cluster; return how many it has then.

    They use the run's `ray` section, and end with the run. Raises JobError if the run is not
    exploring, or the cluster has no room.
    """
    cluster = config.ray
    if cluster is None:
        raise ConfigError(
            "the configuration has no `ray` section; only a run on Ray takes more explorers"
        )
    if config.explorer is not None and config.explorer.engine.sglang is not None:
        raise ConfigError(
            "explorer.engine is sglang, whose servers take the weights of one explorer; name more "
            "servers in `urls` instead"
        )
    with connected(cluster, starts=False) as ray:
        try:
            register: Any = ray.get_actor(register_name(config.name), namespace=NAMESPACE)
            asked = register.ask.remote(explorers)
            # Longer than a start may take, since the run answers only after it.
            message = ray.get(asked, timeout=2 * cluster.startup_timeout)
        except ValueError as error:
            raise JobError(
                f"run `{config.name}` is not exploring on the cluster `{cluster.address}`"
            ) from error
        except ray.exceptions.RayError as error:
            raise JobError(f"run `{config.name}` did not answer: {last_line(error)}") from error
    if isinstance(message, str):
        raise JobError(message)
    return message


class JoinRegistry:
    """Takes requests for explorers and hands them to the run; a Ray actor named after the run."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[int, int]] = asyncio.Queue(maxsize=64)
        self._answers: dict[int, asyncio.Future[int | str]] = {}
        self._number = 0

    async def ask(self, count: int) -> int | str:
        """Request more explorers; return how many there are then, or an error message."""
        self._number += 1
        number = self._number
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._waiting.put((number, count))
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]

    async def next(self) -> tuple[int, int]:
        """Return the next request: its number, and how many explorers."""
        return await self._waiting.get()

    async def answer(self, number: int, message: int | str) -> None:
        """Answer a request."""
        future = self._answers.get(number)
        if future is not None and not future.done():
            future.set_result(message)
