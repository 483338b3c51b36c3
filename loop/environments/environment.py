"""What an environment is: it shows something, is answered, and says what the answer was worth."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...store.records import Message, Task

Shown = str | Sequence[Message]
"""What the policy is told: a text is one user message; messages may be a tool's too."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an environment says to an answer."""

    shown: Shown = ""
    """What the policy is told next; empty: nothing."""
    reward: float | None = None
    """Of this step alone; None: it says nothing of it."""
    is_done: bool = False
    """Whether the episode is over."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements, which are summed over the steps of a try: `{"environment/invalid": 1.0}`."""


class Environment(Protocol):
    """One episode at a time, for one try. Whatever raises here ends the try, and is its error."""

    async def reset(self, task: Task) -> Shown:
        """Begin the episode of a task; return what the policy sees first.

        A text is told behind the task's own messages: as part of the last one, where that is the
        user's. Messages are the whole beginning, the task's own among them or not.
        """
        ...

    async def step(self, answer: Message) -> Step:
        """Take the policy's answer, an assistant message."""
        ...

    async def close(self) -> None:
        """Free what it holds; called once, however the try ended, also before any `reset`."""
        ...


MakeEnvironment = Callable[..., Environment | Awaitable[Environment]]
"""What a configuration names, with its parameters: a class or a function that returns one."""
