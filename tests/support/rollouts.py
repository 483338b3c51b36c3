"""Rollouts without an explorer: `from support.rollouts import rollouts, script`."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlake.loop.inference.policy import Policy, Sampling
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.rollouts.group import RolloutSpec, WorkflowSpec, run_group, workflow_of
from rlake.loop.trajectories.rewards import rewards_of
from rlake.loop.workflows import Workflow
from rlake.store import Experience, Task
from rlake.store.records import Message


def spec_of(workflow: Workflow | WorkflowSpec, **changes: Any) -> RolloutSpec:
    """One rollout of a workflow without rewards, but for some changes; both may be names."""
    if isinstance(workflow, str | Mapping):
        workflow = workflow_of(workflow, changes.get("models", ()))
    if isinstance(changes.get("rewards"), str):
        changes["rewards"] = rewards_of(changes["rewards"])
    given = {"rewards": {}, "group_size": 1, "sampling": Sampling(max_tokens=6), "seed": 0}
    return RolloutSpec(**{"workflow": workflow, "run_id": "demo", **given, **changes})


def script(*texts: str, version: int = 0) -> tuple[ScriptedPolicy, list[Sequence[Message]]]:
    """A policy that says texts in turn, and the messages that it is asked."""
    asked: list[Sequence[Message]] = []
    said = iter(texts)

    def answer(messages: Sequence[Message], i: int) -> str:
        asked.append(messages)
        return next(said)

    return ScriptedPolicy(answer, version=version), asked


def rollouts(
    policy: Policy,
    workflow: Workflow | WorkflowSpec,
    *tasks: Task,
    batch: int = 1,
    first: int = 0,
    **changes: Any,
) -> list[Experience]:
    """Run tasks, from the one with index `first` on, and return the rows."""
    numbered = list(enumerate(tasks))[first:]
    return asyncio.run(run_tasks(numbered, policy, spec_of(workflow, **changes), batch=batch))


async def run_tasks(
    tasks: Sequence[tuple[int, Task]], policy: Policy, spec: RolloutSpec, *, batch: int
) -> list[Experience]:
    """Run tasks, with their indices in the batch, concurrently; return the rows in order."""
    groups = [run_group(task, policy, spec, batch=batch, group_index=i) for i, task in tasks]
    return [row for rows in await asyncio.gather(*groups) for row in rows]
