"""The protocol of environments: observations go to the policy, answers come back for rewards."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...store.records import Message, Task

Shown = str | Sequence[Message]
"""What the policy sees: a text is one user message; messages may also be those of tools."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The response of an environment to an answer."""

    shown: Shown = ""
    """What the policy sees next; empty for nothing."""
    reward: float | None = None
    """The reward of this step alone, or None."""
    is_done: bool = False
    """Whether the episode is over."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics, which are summed over the steps of a rollout: `{"environment/invalid": 1.0}`."""


class Environment(Protocol):
    """One episode at a time, for one rollout. An exception ends the rollout as its error."""

    async def reset(self, task: Task) -> Shown:
        """Begin the episode of a task; return the first observation.

        A text is added to the task's messages, to the last one if that is the user's. Messages
        replace the task's messages.
        """
        ...

    async def step(self, answer: Message) -> Step:
        """Take the policy's answer, an assistant message."""
        ...

    async def close(self) -> None:
        """Free resources; called once, however the rollout ends, even before any `reset`."""
        ...


MakeEnvironment = Callable[..., Environment | Awaitable[Environment]]
"""A class, or a function that returns an environment; configurations name one."""
