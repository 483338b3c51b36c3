"""Environments of the package verifiers, as a workflow: its dataset, its rollouts, its rubric."""

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...store.errors import ConfigError, JobError, missing_extra
from ...store.records import Experience, Message, Task
from ..config.resolve import function
from ..inference.policy import Policy

if TYPE_CHECKING:
    from verifiers import Environment


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
    from ..chat_api.recorded import record

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


def verifiers_tasks(
    *,
    environment: str,
    arguments: Mapping[str, Any] | None = None,
    most: int = -1,
    taskset: str = "verifiers",
) -> Iterator[Task]:
    """Yield the questions of an environment of verifiers, `most` of each split; -1 takes all.

    Those of its `eval_dataset` have the split `eval`.
    """
    world = loaded(environment, arguments)
    for split, rows in (("train", world.dataset), ("eval", world.eval_dataset)):
        if rows is None:
            continue
        for row in rows if most < 0 else rows.select(range(min(most, len(rows)))):
            yield _task(dict(row), split, taskset)


def _task(row: Mapping[str, Any], split: str, taskset: str) -> Task:
    prompt = row["prompt"]
    messages: list[Message] = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [{k: v for k, v in message.items() if v is not None} for message in prompt]
    )
    info = row.get("info") or {}
    return Task(
        messages=messages,
        answer=row.get("answer") or None,
        taskset=taskset,
        split=split,
        metadata={
            "task": row.get("task", "default"),
            "example_id": row.get("example_id", 0),
            "info": json.loads(info) if isinstance(info, str) else dict(info),
        },
    )


def loaded(environment: str, arguments: Mapping[str, Any] | None = None) -> "Environment":
    """Return an environment of verifiers, made once in this process."""
    return _loaded(environment, json.dumps(dict(arguments or {}), sort_keys=True))


@cache
def _loaded(environment: str, arguments: str) -> "Environment":
    try:
        import verifiers as package
    except ImportError as error:
        raise missing_extra("verifiers", "verifiers") from error
    given = json.loads(arguments)
    if ":" in environment:
        return function(environment, ModuleType("none"), "environment")(**given)
    try:
        return package.load_environment(environment, **given)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"verifiers has no environment `{environment}`: {str(error).splitlines()[0]}"
        ) from error
