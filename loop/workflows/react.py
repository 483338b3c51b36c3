"""ReAct (arXiv:2210.03629): the policy reasons, calls tools, reads the results, and answers."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...store.records import Task
from ..environments.tools import Called, Tool, Toolbox
from ..inference.policy import Policy
from ..trajectories.conversation import Conversation
from ..trajectories.trajectory import record_metric

_CALLS = 16
"""Most calls of one answer that are executed; further ones are refused."""


async def react(
    task: Task,
    policy: Policy,
    *,
    tools: Sequence[str | Callable[..., Any]] = (),
    mcp: Mapping[str, Mapping[str, Any]] | None = None,
    max_turns: int = 8,
    tool_seconds: float = 30.0,
    longest_result: int = 8000,
    max_failures: int | None = None,
) -> None:
    """Let the policy call tools until it answers without a call, for at most `max_turns` turns.

    `tools` are functions named `package.module:function` (`environments.tools.tool` derives their
    schemas); `mcp` names servers of the Model Context Protocol, `{command: [...]}` or `{url: ...}`
    (`environments.mcp.McpServer`). The calls of an answer run one after the other, for at most
    `tool_seconds` each, and the first `longest_result` characters of each result are shown. Errors
    are reported to the policy and counted as `tools/...`; more than `max_failures` failed calls end
    the rollout with the `finish_reason` of the last one. The configured rewards judge the last
    answer. `model.tool_call_format` sets the format in which the model writes calls.
    """
    offered: list[str | Callable[..., Any]] = [*tools, *await _of_servers(mcp or {})]
    await answered_with_tools(
        task,
        policy,
        offered,
        max_turns=max_turns,
        tool_seconds=tool_seconds,
        longest_result=longest_result,
        max_failures=max_failures,
    )


async def answered_with_tools(
    task: Task,
    policy: Policy,
    tools: Sequence[str | Callable[..., Any]],
    *,
    max_turns: int = 8,
    tool_seconds: float = 30.0,
    longest_result: int = 8000,
    max_failures: int | None = None,
) -> str | None:
    """Do what `react` does; return the answer, or None if the rollout ended without one."""
    box = Toolbox(
        tools, seconds=tool_seconds, longest=longest_result, note=partial(record_metric, policy)
    )
    conversation = Conversation(task, policy, tools=box.specs)
    failures = 0
    for turn in range(1, max_turns + 1):
        if not await conversation.try_respond():
            return None
        calls = conversation.messages[-1].get("tool_calls") or []
        if not calls:
            return str(conversation.messages[-1].get("content") or "")
        if turn == max_turns:
            conversation.finish("tool_calls")
            return None
        async for called in results(box, calls):
            conversation.messages.append(called.message)
            failures += called.failure is not None
            if called.failure and max_failures is not None and failures > max_failures:
                conversation.finish(called.failure)
                return None
    return None


async def results(box: Toolbox, calls: Sequence[Mapping[str, Any]]) -> AsyncIterator[Called]:
    """Carry out the calls of an answer, one after the other; those beyond 16 are refused."""
    for number, call in enumerate(calls):
        yield await box.call(call) if number < _CALLS else box.refused(call, most=_CALLS)


async def _of_servers(servers: Mapping[str, Mapping[str, Any]]) -> list[Tool]:
    if not servers:
        return []
    from ..environments.mcp import mcp_tools

    return await mcp_tools(servers)
