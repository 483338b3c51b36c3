"""Trying tasks: workflow, rewards and ids make the rows that a group of tries becomes."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ..operators import rewards as reward_module
from ..store import Store
from ..store.errors import JobError, RlakeError, SchemaError
from ..store.ids import content_id, group_id, rollout_id
from ..store.records import Experience, Message, Task
from ..store.schema import TABLES
from ..store.validate import conform
from . import workflows as workflow_module
from .policy import Completion, Policy, Sampling
from .resolve import function
from .workflows import Workflow

Reward = Callable[[Task, Experience], float | None]
"""What users write to judge a try; None when it cannot be judged."""
_LONGEST = 2000
"""Most characters of a drop_reason."""


def rewards_of(spec: str | Mapping[str, float]) -> dict[str, tuple[Reward, float]]:
    """Return the reward functions that a configuration names, with their weights."""
    weights = {spec: 1.0} if isinstance(spec, str) else spec
    return {
        name.rpartition(":")[2]: (function(name, reward_module, "reward"), weight)
        for name, weight in weights.items()
    }


def workflow_of(name: str) -> Workflow:
    """Return the workflow that a configuration names."""
    return cast(Workflow, function(name, workflow_module, "workflow"))


class SeededPolicy:
    """The policy as one rollout sees it: each of its requests has a seed of its own.

    The seed is a function of the rollout's id and the number of the request, so that a rollout
    that is made again is the same.
    """

    def __init__(self, policy: Policy, sampling: Sampling, seed: int, rollout: str) -> None:
        self._policy, self._sampling, self._seed, self._rollout = policy, sampling, seed, rollout
        self._requests = 0

    @property
    def version(self) -> int:
        """The version that a request sent now is answered with."""
        return self._policy.version

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[dict[str, Any]] | None = None,
        sampling: Sampling | None = None,
    ) -> list[Completion]:
        """Pass the request on with its seed."""
        seed = int(content_id(self._seed, self._rollout, self._requests, length=12), 16)
        self._requests += 1
        chosen = replace(sampling or self._sampling, seed=seed)
        return await self._policy.generate(messages, n=n, tools=tools, sampling=chosen)


async def try_tasks(
    tasks: Sequence[tuple[int, Task]],
    policy: Policy,
    *,
    workflow: Workflow,
    rewards: Mapping[str, tuple[Reward, float]],
    group_size: int,
    sampling: Sampling,
    seed: int,
    run_id: str,
    step: int,
    try_seconds: float | None = None,
) -> list[Experience]:
    """Try each task `group_size` times, all at once, and return the rows in order.

    `tasks` come with their places in the batch `step`; one that names a workflow is tried with its
    own. A try that raises, or takes longer than `try_seconds`, becomes a row with that as its
    drop_reason, so that one bad task never stops the others.
    """
    jobs = [
        _rollout(
            task, policy, workflow, rewards, sampling, seed, run_id, step, place, i, try_seconds
        )
        for place, task in tasks
        for i in range(group_size)
    ]
    return [row for rollout in await asyncio.gather(*jobs) for row in rollout]


async def _rollout(
    task: Task,
    policy: Policy,
    workflow: Workflow,
    rewards: Mapping[str, tuple[Reward, float]],
    sampling: Sampling,
    seed: int,
    run_id: str,
    step: int,
    place: int,
    number: int,
    try_seconds: float | None,
) -> list[Experience]:
    group = group_id(run_id, step, place)
    name = rollout_id(group, number)
    seeded = SeededPolicy(policy, sampling, seed, name)
    limit = asyncio.timeout(try_seconds)
    try:
        own = workflow_of(task.workflow) if task.workflow else workflow
        async with limit:
            made = await own(task, seeded)
        rows = [made] if isinstance(made, Experience) else list(made)
        if not rows:
            raise JobError("it returned no experience")
        rows = [_judge(task, row, rewards) for row in rows]
    except Exception as error:  # noqa: BLE001 - the boundary to users' code: one bad try never stops a job
        why = f"it took longer than {try_seconds} s" if limit.expired() else _said(error)
        rows = [_failed(task, policy, f"workflow failed: {why}")]
    return [
        replace(
            row,
            experience_id=rollout_id(group, number, i),
            group_id=group,
            rollout=number,
            run_id=run_id,
            step=step,
        )
        for i, row in enumerate(rows)
    ]


def _judge(task: Task, row: Experience, rewards: Mapping[str, tuple[Reward, float]]) -> Experience:
    """Add the rewards, unless the workflow gave one itself."""
    if row.reward is not None or not rewards:
        return row
    parts: dict[str, float | None] = {}
    failed: list[str] = []
    for name, (reward, weight) in rewards.items():
        try:
            value = reward(task, row)
            parts[name] = None if value is None else weight * float(value)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"it gave {value}, expected a finite number or None")
        except Exception as error:  # noqa: BLE001 - the boundary to users' code: the tokens are kept
            parts[name] = None
            failed.append(f"reward `{name}` failed: {_said(error)}")
    judged = row.with_reward(parts)
    return replace(judged, drop_reason="; ".join(failed)[:_LONGEST]) if failed else judged


def store_rows(store: Store, rows: Sequence[Experience]) -> list[Experience]:
    """Append the rows of tries; return them as stored: one that does not fit says why instead."""
    try:
        store.append("experiences", rows)
        return list(rows)
    except (SchemaError, TypeError):  # a TypeError: messages or metadata that are no JSON
        fitting = [_fitting(row) for row in rows]
    store.append("experiences", fitting)
    return fitting


def _fitting(row: Experience) -> Experience:
    try:
        conform(TABLES["experiences"], [row])
        return row
    except (SchemaError, TypeError) as error:
        return Experience(
            task_id=row.task_id,
            group_id=row.group_id,
            experience_id=row.experience_id,
            rollout=row.rollout,
            run_id=row.run_id,
            step=row.step,
            finish_reason="error",
            drop_reason=f"the workflow's row does not fit: {error}"[:_LONGEST],
            num_turns=0,
        )


def _failed(task: Task, policy: Policy, reason: str) -> Experience:
    return Experience(
        task_id=task.task_id,
        messages=list(task.messages),
        prompt_text=task.prompt_text,
        finish_reason="error",
        drop_reason=reason[:_LONGEST],
        policy_version=policy.version,
        num_turns=0,
    )


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, RlakeError) else f"{type(error).__name__}: "
    return f"{kind}{error}"
