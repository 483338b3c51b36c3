"""Workflows: async functions that run a policy on a task and return rows to train on.

A workflow is `async (task, policy, **parameters) -> Experience | list[Experience]`. It may also
return its reward, as a number or as named parts, or nothing. The rows are then built from the turns
of the policy; if there are several, the one that ended last is judged for all of them. A workflow
may raise: the explorer stores a row with the error. The explorer fills in the ids, the run and the
batch, and computes rewards where the workflow returns none. A row with a `group_id` belongs to a
subgroup of that name, and must have its own reward.

Under `@of_group` (`operators.reward_protocol`) a workflow is given the policies of all rollouts of
a group and returns the rows of all of them; `rollout_index` of a row names its rollout.

There is one workflow per file; `explorer.workflow` may name any of them.
"""

from collections.abc import Awaitable, Callable, Mapping

from ...store.records import Experience
from .agent import agent
from .agent_program import agent_program
from .email_search import email_search
from .learn_to_ask import learn_to_ask
from .multi_turn import multi_turn
from .on_policy_distillation import on_policy_distillation
from .react import react
from .reflect_and_retry import reflect_and_retry
from .retry_from_step import retry_from_step
from .self_judging import self_judging
from .single_turn import single_turn
from .step_wise import step_wise
from .thinking import thinking_budget
from .tool_agent_user import tool_agent_user
from .tool_calls import tool_calls
from .user_simulator import user_simulator
from .verifiers import verifiers

Made = Experience | list[Experience] | float | Mapping[str, float | None] | None
"""What a workflow may return."""
Workflow = Callable[..., Awaitable[Made]]
"""What users write to produce experience."""

__all__ = [
    "agent",
    "agent_program",
    "email_search",
    "learn_to_ask",
    "multi_turn",
    "on_policy_distillation",
    "react",
    "reflect_and_retry",
    "retry_from_step",
    "self_judging",
    "single_turn",
    "step_wise",
    "thinking_budget",
    "tool_agent_user",
    "tool_calls",
    "user_simulator",
    "verifiers",
]
