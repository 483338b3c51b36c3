"""Ask once, answer once."""

from ...store.records import Experience, Task
from ..inference.policy import Completion, Policy, Turn
from ..trajectories.trajectory import to_experiences


async def single_turn(task: Task, policy: Policy) -> Experience:
    """Ask once, answer once."""
    [completion] = await policy.generate(task.messages)
    return experience(task, completion)


def experience(task: Task, completion: Completion) -> Experience:
    """Turn one completion into a row: the sampled tokens, and only they, are trained on.

    Per-token columns are aligned with prompt and response together; at prompt tokens the mask is
    false and the log-prob 0.
    """
    [row] = to_experiences(task, [Turn(messages=list(task.messages), completion=completion)])
    return row
