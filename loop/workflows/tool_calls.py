"""Tool-N1 (arXiv:2505.00024): one turn that must call the right tools with the right arguments.

The task's metadata has `tools`, the functions in the form of chat APIs, and `tool_calls`, the
expected calls.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from ...operators.reward_protocol import Verdict
from ...operators.rewards import tool_call_match
from ...store.errors import ConfigError
from ...store.records import Message, Task
from ..inference.policy import Policy
from ..trajectories.conversation import Conversation
from ..trajectories.trajectory import record_metric


async def tool_calls(
    task: Task, policy: Policy, *, order: Literal["same", "any", "contains"] = "same"
) -> dict[str, float | None]:
    """Ask once, with the task's tools; the reward is `tool_call_match` of the calls.

    No tool is executed. A call to an unknown tool, or with arguments that are not a JSON object,
    ends the rollout as `unknown_tool` or `malformed_arguments`, counted as `tools/unknown` or
    `tools/malformed`. Raises ConfigError for a task without tools.
    """
    tools = _offered(task)
    conversation = Conversation(task, policy, tools=tools)
    await conversation.respond()
    calls = conversation.messages[-1].get("tool_calls") or []
    names = {one["function"]["name"] for one in tools}
    wrong = next((bad for call in calls if (bad := _wrong(call["function"], names))), None)
    if calls:
        record_metric(policy, "tools/calls", float(len(calls)))
        conversation.finish(wrong or "tool_calls")
    if wrong:
        record_metric(policy, "tools/unknown" if wrong == "unknown_tool" else "tools/malformed")
        return {"tool_call_match": 0.0}
    judged = tool_call_match(task, conversation.rows()[-1], order=order)
    return {"tool_call_match": judged.value if isinstance(judged, Verdict) else judged}


def _offered(task: Task) -> list[dict[str, Any]]:
    """Return a task's tools in the form of chat APIs; bare functions are wrapped."""
    given = (task.metadata or {}).get("tools")
    named = isinstance(given, list) and all(_has_name(one) for one in given)
    if not given or not named:
        raise ConfigError(
            f"task `{task.task_id}` has no `tools` in its metadata that have names; expected a "
            "list as `[{type: function, function: {name: ..., parameters: ...}}]`"
        )
    return [one if "function" in one else {"type": "function", "function": one} for one in given]


def _has_name(one: Any) -> bool:
    function = one.get("function", one) if isinstance(one, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _wrong(function: Message, names: set[str]) -> str | None:
    if function["name"] and function["name"] not in names:
        return "unknown_tool"
    try:
        is_object = isinstance(json.loads(function["arguments"] or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    return None if function["name"] and is_object else "malformed_arguments"
