"""Sample one answer to a task."""

from ...store.records import Experience, Task
from ..inference.policy import Completion, Policy, Turn
from ..trajectories.trajectory import to_experiences


async def single_turn(task: Task, policy: Policy) -> Experience:
    """Sample one answer to the task's messages."""
    [completion] = await policy.generate(task.messages)
    return experience(task, completion)


def experience(task: Task, completion: Completion) -> Experience:
    """Return a completion as a row; only its sampled tokens are trained on."""
    [row] = to_experiences(task, [Turn(messages=list(task.messages), completion=completion)])
    return row
