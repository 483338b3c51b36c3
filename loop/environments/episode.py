"""The environment of one rollout: limited in concurrency, and always closed."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

from ...operators.concurrency import shared_semaphore
from ...operators.import_path import find_function, taken_apart
from ...store.errors import ConfigError
from ...store.records import Message, Task
from ..inference.policy import Policy
from ..trajectories.trajectory import record_metric
from .environment import Environment, MakeEnvironment, Shown, Step

EnvironmentSpec = str | Mapping[str, Mapping[str, Any] | None] | MakeEnvironment
"""A name, `{name: {parameter: value}}`, or a factory."""
_log = logging.getLogger(__name__)


@asynccontextmanager
async def opened(
    spec: EnvironmentSpec, policy: Policy, *, at_once: int | None, close_seconds: float
) -> AsyncIterator[Environment]:
    """Make an environment, and close it when the block ends, even by a timeout.

    At most `at_once` environments of a name are open at the same time; others wait. If `close`
    raises or takes longer than `close_seconds`, the environment is abandoned and counted as
    `environment/leaked`. Raises ConfigError if the parameters do not fit.
    """
    name, maker = _maker(spec)
    # The semaphore is held until the environment is closed, since closing takes resources too.
    async with shared_semaphore(name, at_once) if at_once else nullcontext():
        environment = await _made(name, maker)
        try:
            yield environment
        finally:
            await _closed(environment, name, policy, close_seconds)


async def make(spec: EnvironmentSpec) -> Environment:
    """Make an environment, which the caller closes. Raises ConfigError as `opened` does."""
    return await _made(*_maker(spec))


def beginning(task: Task, shown: Shown) -> list[Message]:
    """Return the messages that an episode begins with.

    >>> beginning(Task.ask("Reach the door."), "You are in a cell.")[0]["content"]
    'Reach the door.\\n\\nYou are in a cell.'
    """
    return joined(task.messages, shown) if isinstance(shown, str) else list(shown)


def joined(messages: Sequence[Message], shown: str) -> list[Message]:
    """Return messages with a text added, to the last one if that is the user's."""
    made = list(messages)
    if not shown:
        return made
    if made and made[-1].get("role") == "user":
        return [*made[:-1], {**made[-1], "content": f"{made[-1]['content']}\n\n{shown}"}]
    return [*made, {"role": "user", "content": shown}]


def as_messages(shown: Shown) -> list[Message]:
    """Return an observation as messages."""
    if isinstance(shown, str):
        return [{"role": "user", "content": shown}] if shown else []
    return list(shown)


def noted(policy: Policy, step: Step) -> Step:
    """Record the metrics of a step, and return the step."""
    for name, value in {"environment/steps": 1.0, **step.metrics}.items():
        record_metric(policy, name, value)
    return step


def _maker(spec: EnvironmentSpec) -> tuple[str, MakeEnvironment]:
    if not isinstance(spec, str | Mapping):
        return f"{getattr(spec, '__module__', '')}:{getattr(spec, '__qualname__', spec)}", spec
    name, given = taken_apart(spec, "an environment")
    home = import_module("..environments", __package__)
    return name, partial(find_function(name, home, "environment"), **given)


async def _made(name: str, make: MakeEnvironment) -> Environment:
    try:
        made = make()
    except TypeError as error:
        raise ConfigError(f"the environment `{name}` cannot be made so: {error}") from error
    return await made if inspect.isawaitable(made) else made


async def _closed(environment: Environment, name: str, policy: Policy, seconds: float) -> None:
    """Close an environment in a separate task, which a second cancellation does not end."""
    closing = asyncio.ensure_future(environment.close())
    why: str | BaseException | None = f"it takes longer than {seconds:g} s"
    try:
        # `wait`, unlike `wait_for`, leaves `closing` running when this task is cancelled.
        done, _ = await asyncio.wait({closing}, timeout=seconds)
        if done:
            why = "it was cancelled" if closing.cancelled() else closing.exception()
        else:
            closing.cancel()
    finally:
        if why is not None:
            record_metric(policy, "environment/leaked")
            _log.warning("the environment `%s` could not be closed: %s", name, why)
