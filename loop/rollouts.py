"""Trying tasks: workflow, rewards and ids make the rows that a group of tries becomes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from ..operators import rewards as reward_module
from ..operators.scoring import Judged, said, short, verdict, verdicts
from ..operators.verdict import GroupReward, Reward, looks_at, with_parameters
from ..store import Store
from ..store.errors import ConfigError, JobError, OperatorError, RlakeError, SchemaError
from ..store.ids import content_id, group_id, rollout_id
from ..store.records import Experience, Message, Task
from ..store.schema import TABLES
from ..store.validate import conform
from . import workflows as workflow_module
from .policy import Completion, Policy, Sampling
from .resolve import function
from .workflows import Workflow

RewardSpec = str | Mapping[str, float | Mapping[str, Any] | None]
"""One reward by name, or several: their weights, or their parameters with `weight` among them."""
T = TypeVar("T")
_LONGEST = 2000
"""Most characters of a drop_reason."""


def rewards_of(spec: RewardSpec) -> dict[str, tuple[Reward, float]]:
    """Return the reward functions that a configuration names, with their weights.

    >>> rewards_of({"overlong": {"max_tokens": 20, "cache": 10, "weight": 0.5}})["overlong"][1]
    0.5

    Raises ConfigError for an unknown name, or parameters that do not fit.
    """
    specs = {spec: None} if isinstance(spec, str) else spec
    return {short(name): _reward(name, given) for name, given in specs.items()}


def _reward(name: str, given: float | Mapping[str, Any] | None) -> tuple[Reward, float]:
    parameters = dict(given) if isinstance(given, Mapping) else {}
    weight = parameters.pop("weight", 1.0) if given is None or isinstance(given, Mapping) else given
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"the weight of reward `{name}` must be a number, got {weight!r}")
    found = function(name, reward_module, "reward")
    try:
        return with_parameters(name, found, parameters), float(weight)
    except OperatorError as error:
        raise ConfigError(str(error)) from error


def workflow_of(name: str) -> Workflow:
    """Return the workflow that a configuration names."""
    return cast(Workflow, function(name, workflow_module, "workflow"))


@dataclass(frozen=True)
class _Try:
    """A row of a try, and whether its reward is still to be found."""

    row: Experience
    is_to_judge: bool


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
    of_group = {
        n: (cast(GroupReward, r), w) for n, (r, w) in rewards.items() if looks_at(r) == "group"
    }
    of_row = {n: r for n, r in rewards.items() if n not in of_group}

    async def group(place: int, task: Task) -> list[Experience]:
        jobs = [
            _rollout(
                task, policy, workflow, of_row, sampling, seed, run_id, step, place, i, try_seconds
            )
            for i in range(group_size)
        ]
        tries = [row for rollout in await asyncio.gather(*jobs) for row in rollout]
        return await _judge_group(task, tries, of_group, try_seconds)

    made = await asyncio.gather(*(group(place, task) for place, task in tasks))
    return [row for rows in made for row in rows]


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
) -> list[_Try]:
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
        tries = [_Try(row, is_to_judge=row.reward is None) for row in rows]
        tries = [await _judge(task, one, rewards, try_seconds) for one in tries]
    except Exception as error:  # noqa: BLE001 - the boundary to users' code: one bad try never stops a job
        why = f"it took longer than {try_seconds} s" if limit.expired() else _said(error)
        tries = [_Try(_failed(task, policy, f"workflow failed: {why}"), is_to_judge=False)]
    return [
        replace(
            one,
            row=replace(
                one.row,
                experience_id=rollout_id(group, number, i),
                group_id=group,
                rollout=number,
                run_id=run_id,
                step=step,
            ),
        )
        for i, one in enumerate(tries)
    ]


async def _judge(
    task: Task, one: _Try, rewards: Mapping[str, tuple[Reward, float]], seconds: float | None
) -> _Try:
    """Add the rewards, unless the workflow gave one itself."""
    if not one.is_to_judge or not rewards:
        return one
    judged = await asyncio.gather(
        *(_asked(reward, (task, one.row), verdict, seconds) for reward, _ in rewards.values())
    )
    return replace(one, row=_with(one.row, dict(zip(rewards, judged, strict=True)), rewards))


async def _judge_group(
    task: Task,
    tries: Sequence[_Try],
    rewards: Mapping[str, tuple[GroupReward, float]],
    seconds: float | None,
) -> list[Experience]:
    """Add the rewards that compare the tries of a group with each other."""
    rows = [one.row for one in tries if one.is_to_judge]
    if not rewards or not rows:
        return [one.row for one in tries]
    made: list[dict[str, _Told]] = [{} for _ in rows]
    for name, (reward, _) in rewards.items():
        values, error = await _asked(
            reward, (task, rows), lambda told: verdicts(told, len(rows)), seconds
        )
        for found, one in zip(made, values or [None] * len(rows), strict=True):
            found[name] = one, error
    judged = iter([_with(row, found, rewards) for row, found in zip(rows, made, strict=True)])
    return [next(judged) if one.is_to_judge else one.row for one in tries]


_Told = tuple[Judged | None, str | None]
"""A reward with its reason, or what went wrong."""


async def _asked(
    reward: Callable[..., Any],
    given: tuple[Any, Any],
    read: Callable[[Any], T],
    seconds: float | None,
) -> tuple[T | None, str | None]:
    """Return what a reward function says, or what went wrong."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return read(await said(reward(*given))), None
    except Exception as error:  # noqa: BLE001 - the boundary to users' code: the tokens are kept
        return None, f"it took longer than {seconds} s" if limit.expired() else _said(error)


def _with(
    row: Experience,
    made: Mapping[str, _Told],
    rewards: Mapping[str, tuple[Callable[..., Any], float]],
) -> Experience:
    """Add parts of the reward to a row, with their reasons; what failed is why it is dropped."""
    parts: dict[str, float | None] = dict(row.rewards)
    failed = [row.drop_reason] if row.drop_reason else []
    reasons = {}
    for name, (judged, error) in made.items():
        value, reason = judged or (None, None)
        parts[name] = None if value is None else rewards[name][1] * value
        reasons |= {name: reason} if reason else {}
        failed += [f"reward `{name}` failed: {error}"] if error else []
    drop_reason = "; ".join(failed)[:_LONGEST] or None
    metadata = {**(row.metadata or {}), "reward_details": reasons} if reasons else row.metadata
    return replace(row.with_reward(parts), drop_reason=drop_reason, metadata=metadata)


def store_rows(store: Store, rows: Sequence[Experience]) -> list[Experience]:
    """Append the rows of tries; return them as stored: one that does not fit says why instead."""
    try:
        store.append("experiences", rows)
        return list(rows)
    except (SchemaError, TypeError):  # a TypeError: messages or metadata that are no JSON
        those = fitting(rows)
    store.append("experiences", those)
    return those


def fitting(rows: Sequence[Experience]) -> list[Experience]:
    """Return rows that the table takes: one that does not fit says why instead."""
    return [_fitting(row) for row in rows]


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
