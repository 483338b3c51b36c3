"""Workflows: async functions that let a policy try a task, and return what can be trained on.

A workflow is `async (task, policy, **parameters) -> Experience | list[Experience]`. It may also
return its reward, a number or named parts, or nothing: then the rows are made of the turns that the
policy was asked for, and where these are several rows, the one that ended last is judged for all.
It may raise: the explorer stores a row with the error. Ids, run and step are stamped by the
explorer, and rewards are computed where the workflow gives none. A row with a `group_id` stands
apart, in a group of that name below that of the others, and brings its reward.

Under `@of_group` (`operators.verdict`) a workflow is given the policies of all tries of a group,
and makes the rows of all of them; each says in `rollout` which try it is of.

Each file has one; its public functions are what `explorer.workflow` may name.
"""

from collections.abc import Awaitable, Callable, Mapping

from ...store.records import Experience
from .agent import agent
from .multi_turn import multi_turn
from .on_policy_distillation import on_policy_distillation
from .react import react
from .reflect_and_retry import reflect_and_retry
from .retry_from_step import retry_from_step
from .self_judging import self_judging
from .single_turn import single_turn
from .step_wise import step_wise
from .thinking import thinking_budget
from .tool_calls import tool_calls
from .user_simulator import user_simulator
from .verifiers import verifiers

Made = Experience | list[Experience] | float | Mapping[str, float | None] | None
"""What a workflow may return."""
Workflow = Callable[..., Awaitable[Made]]
"""What users write to produce experience."""

__all__ = [
    "agent",
    "multi_turn",
    "on_policy_distillation",
    "react",
    "reflect_and_retry",
    "retry_from_step",
    "self_judging",
    "single_turn",
    "step_wise",
    "thinking_budget",
    "tool_calls",
    "user_simulator",
    "verifiers",
]
