"""Groups whose rollouts are one request each: prompt and settings are read once for all."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from time import perf_counter
from typing import TypeGuard

from ...operators.user_errors import one_line
from ...store.errors import JobError
from ...store.records import Experience, Task
from ..inference.cancellation import CancelScope, cancel_reason, cancel_scope
from ..inference.chat_policy import ChatPolicy
from ..inference.policy import Completion, Policy
from ..trajectories.rewards import LONGEST
from ..trajectories.trajectory import Answers, RolloutPolicy, finish_reason, no_answer
from ..trajectories.user_code import guarded
from ..workflows import Workflow
from ..workflows.single_turn import single_turn
from .timeouts import RolloutTimer, cut_short, run_with_timeout


def is_one_request(policy: Policy, workflow: Workflow) -> TypeGuard[ChatPolicy]:
    """Return whether each rollout is one request to an engine of this run."""
    return workflow is single_turn and isinstance(policy, ChatPolicy)


async def sample_group(
    task: Task,
    policy: ChatPolicy,
    rollouts: Sequence[RolloutPolicy],
    deliver: Callable[[int, Experience], None],
    *,
    timer: RolloutTimer,
    timeout: float | None,
) -> bool:
    """Call `deliver` with each rollout's number and row as soon as it is sampled.

    The rows are those of `single_turn`; those that failed or were cut short have a `drop_reason`.
    False: nothing was sampled, and the rollouts have to be run one by one.
    """
    try:
        if cancel_reason() is not None:
            return False
        answers = policy.answers(task.messages, [rollout.seeded() for rollout in rollouts])
    except Exception:  # noqa: BLE001 - each rollout says it in its own row, when run one by one
        return False
    if answers is None:
        return False
    started = perf_counter()
    scope = CancelScope()
    rows = Answers(task)
    left = dict.fromkeys(range(len(rollouts)))

    def end(number: int, work: "asyncio.Future[Completion]") -> None:
        if number not in left:
            return
        del left[number]
        cut = cut_short(scope)
        try:
            with guarded():
                row = rows.row(work.result())
        except Exception as error:  # noqa: BLE001 - one bad rollout never stops a job
            why = cut or (f"workflow failed: {one_line(error)}"[:LONGEST], finish_reason(error))
            row = _without_answer(task, policy, why)
        else:
            if cut is not None:
                row = row.updated(drop_reason=cut[0], finish_reason=cut[1])
            else:
                # without those that were cut, which would pull the adaptive timeout down
                timer.note(perf_counter() - started)
        deliver(number, row)

    outside = copy_context()  # rewards that begin are not in the scope of the timeout
    with cancel_scope(scope):
        # Created inside the scope, because a task keeps the context in which it is created.
        works = [asyncio.ensure_future(answer) for answer in answers]
    for number, work in enumerate(works):
        work.add_done_callback(partial(end, number), context=outside)
    # after the callbacks above, so that all rows are made once it ends
    every = asyncio.gather(*works, return_exceptions=True)
    # or a cancellation, which is not raised here, would be logged
    every.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        with suppress(JobError):  # an engine that does not end a request; its row is made below
            await run_with_timeout(every, timer.limit(timeout), scope)
        unended = ("workflow failed: it did not end when it was stopped", "error")
        for number in left:
            deliver(number, _without_answer(task, policy, cut_short(scope) or unended))
    finally:
        left.clear()  # a request that ends later, and those that end since this is cancelled
    return True


def _without_answer(task: Task, policy: ChatPolicy, why: tuple[str, str]) -> Experience:
    row = no_answer(task, policy.version)
    return row.updated(drop_reason=why[0], finish_reason=why[1])
