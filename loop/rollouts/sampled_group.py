"""Groups whose rollouts are one request each: the engine gets all of them in one call."""

import asyncio
from collections.abc import Sequence
from typing import TypeGuard

from ...store.errors import JobError
from ...store.records import Experience, Task
from ..inference.cancellation import CancelScope, cancel_reason, cancel_scope
from ..inference.chat_policy import ChatPolicy
from ..inference.policy import Policy
from ..trajectories.trajectory import RolloutPolicy, answered, no_answer
from ..workflows import Workflow
from ..workflows.single_turn import single_turn
from .timeouts import RolloutTimer, run_with_timeout


def is_one_request(policy: Policy, workflow: Workflow) -> TypeGuard[ChatPolicy]:
    """Return whether each rollout is one request to an engine of this run."""
    return workflow is single_turn and isinstance(policy, ChatPolicy)


async def sample_group(
    task: Task,
    policy: ChatPolicy,
    rollouts: Sequence[RolloutPolicy],
    *,
    timer: RolloutTimer,
    timeout: float | None,
) -> list[Experience] | None:
    """Return the row of each rollout; those that were cut short have a `drop_reason`.

    The rows are those of `single_turn`, without a task, a future and a timer for each rollout.
    None: the request failed, and the rollouts have to be run one by one, each with its own error.
    """
    scope = CancelScope()
    sampling = [rollout.seeded() for rollout in rollouts]
    try:
        if cancel_reason() is not None:
            return None
        with cancel_scope(scope):
            # Created inside the scope, because a task keeps the context in which it is created.
            work = asyncio.ensure_future(policy.answers(task.messages, sampling))
        completions = await run_with_timeout(work, timer.limit(timeout), scope)
    except JobError:
        if scope.reason is None:
            return None
        row = no_answer(task, policy.version)
        late = row.updated(drop_reason=scope.reason, finish_reason="timeout")
        return [late for _ in rollouts]
    cut = (scope.reason, "timeout") if scope.reason else (f"stopped: {cancel_reason()}", "abort")
    made = []
    for row, completion in zip(answered(task, completions), completions, strict=True):
        if completion.finish_reason == "abort":
            row = row.updated(drop_reason=cut[0], finish_reason=cut[1])
        else:
            # without those that were cut, which would pull the adaptive timeout down
            timer.note(completion.timing.total)
        made.append(row)
    return made
