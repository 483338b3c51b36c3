"""The workflow `verifiers`: environments of the package of that name."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ...store.errors import JobError
from ...store.records import Experience, Task
from ..environments.verifiers import loaded
from ..inference.policy import Policy


async def verifiers(
    task: Task,
    policy: Policy,
    *,
    environment: str,
    arguments: Mapping[str, Any] | None = None,
) -> list[Experience]:
    """Let an environment of verifiers try a task of `verifiers_tasks`; its rubric is the reward.

    `environment` is the name of one that is installed, or `package.module:function`, which makes
    it; `arguments` go to it. The environment asks the policy as it would ask any server. The
    rubric's parts are in the rows' `metrics`, called `verifiers/NAME`.
    """
    from ..chat_api.recording import record

    world = loaded(environment, arguments)
    summary = dict(task.metadata or {})
    asked = {
        "prompt": [dict(message) for message in task.messages],
        "answer": task.answer or "",
        "task": summary.get("task", "default"),
        "example_id": summary.get("example_id", 0),
        "info": summary.get("info") or {},
    }
    async with record(policy, task) as session:
        state: Any = await world.rollout(asked, session.client, session.model, {})  # type: ignore[arg-type]
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
