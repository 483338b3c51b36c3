"""The workflow `verifiers`: environments of the package verifiers."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ...store.errors import JobError
from ...store.records import Experience, Task
from ..environments.verifiers import loaded
from ..inference.policy import Policy


async def verifiers(
    task: Task, policy: Policy, *, environment: str, arguments: Mapping[str, Any] | None = None
) -> list[Experience]:
    """Run a task of `verifiers_tasks` in its environment; the reward is that of its rubric.

    `environment` is the name of an installed environment, or a `package.module:function` that
    returns one; `arguments` are passed to it. The environment calls the policy like any other
    server. The parts of the rubric are in the rows' `metrics`, as `verifiers/NAME`.
    """
    from ..chat_api.recording import record

    world = loaded(environment, arguments)
    known = dict(task.metadata or {})
    asked = {
        "prompt": [dict(message) for message in task.messages],
        "answer": task.answer or "",
        "task": known.get("task", "default"),
        "example_id": known.get("example_id", 0),
        "info": known.get("info") or {},
    }
    async with record(policy, task) as session:
        state: Any = await world.rollout(asked, session.client, session.model, {})  # type: ignore[arg-type]
        # The policy's own error comes first: it carries the finish reason.
        if session.failure is not None:
            raise session.failure
        if state.get("error") is not None:
            raise JobError(f"the environment `{environment}` failed: {state['error']}")
        await world.rubric.score_rollout(state, score_sem=nullcontext())
        rows = session.rows()
    parts = state.get("metrics") or {}
    measured = {f"verifiers/{name}": float(value) for name, value in parts.items()}
    reward = None if state["reward"] is None else float(state["reward"])
    return [
        replace(row, metrics={**row.metrics, **measured}).with_reward({"rubric": reward})
        for row in rows
    ]
