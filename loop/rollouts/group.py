"""Trying tasks: workflow, rewards and ids make the rows that a group of tries becomes."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, cast

from ...operators.reward_protocol import Reward, looks_at, with_parameters
from ...store.errors import ConfigError, JobError, OperatorError
from ...store.ids import group_id, rollout_id
from ...store.records import Experience, Task
from .. import workflows as workflow_module
from ..config.resolve import function
from ..inference.cancellation import CancelScope, cancel_reason, cancel_scope
from ..inference.policy import Policy, Sampling
from ..trajectories.group import GroupPolicies, as_judged, named
from ..trajectories.rewards import LONGEST, Rewards, one_line
from ..trajectories.trajectory import RolloutPolicy, finish_reason, to_experiences
from ..trajectories.user_code import check_rows, guard
from ..workflows import Made, Workflow
from .timeouts import RolloutTimer, run_with_timeout

WorkflowSpec = str | Mapping[str, Mapping[str, Any] | None]
"""A workflow by name, or `{name: {parameter: value}}`."""


def workflow_of(
    spec: WorkflowSpec, models: Collection[str] | Mapping[str, Policy] = ()
) -> Workflow:
    """Return the workflow that a configuration names, with its parameters.

    A parameter that is called as one of `models`, the configuration's other models, is given it.
    Raises ConfigError for an unknown name, or parameters that do not fit.
    """
    named = {spec: None} if isinstance(spec, str) else spec
    if len(named) != 1:
        raise ConfigError(f"expected one workflow, got {list(named)}")
    name, given = next(iter(named.items()))
    found = function(name, workflow_module, "workflow")
    try:
        made = with_parameters(name, found, dict(given or {}), what="workflow", others=models)
    except OperatorError as error:
        raise ConfigError(str(error)) from error
    return cast(Workflow, made)


def with_models(workflow: Workflow, models: Mapping[str, Policy]) -> Workflow:
    """Give a workflow the models that it names as parameters."""
    from ...operators.reward_protocol import parameters

    known = parameters(workflow)
    wanted = {n: m for n, m in models.items() if known is None or n in known}
    return partial(workflow, **wanted) if wanted else workflow


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """How a job tries tasks."""

    workflow: Workflow
    rewards: Mapping[str, tuple[Reward, float]]
    group_size: int
    sampling: Sampling
    seed: int
    run_id: str
    greedy_tries: int = 0
    """Tries at temperature 0 behind the others, to compare with and not to train on."""
    rollout_timeout: float | None = None
    """The longest that a try, or a reward, may take."""
    retries: int = 0
    """How often a try that raised or took too long is made again."""
    models: dict[str, Policy] = field(default_factory=dict)
    """Other models, by the name of the workflow's parameter that takes them."""
    places: asyncio.Semaphore | None = None
    """Bounds the tries that are under way at once."""
    clock: RolloutTimer = field(default_factory=RolloutTimer)
    """How long tries took, for limits that follow it."""


@dataclass(frozen=True)
class RolloutRow:
    """A row of a try, and whether its reward is still to be found."""

    row: Experience
    is_to_judge: bool
    follows: bool = False
    """Whether its reward is that of the try's last row: its turns became several rows."""


async def run_tasks(
    tasks: Sequence[tuple[int, Task]], policy: Policy, trying: RolloutSpec, *, step: int
) -> list[Experience]:
    """Try tasks, all at once, and return the rows in order.

    `tasks` come with their places in the batch `step`.
    """
    made = await asyncio.gather(
        *(run_group(task, policy, trying, step=step, place=place) for place, task in tasks)
    )
    return [row for rows in made for row in rows]


async def run_group(
    task: Task, policy: Policy, trying: RolloutSpec, *, step: int, place: int
) -> list[Experience]:
    """Try a task as often as its group has tries, all at once, and return the rows in order.

    Greedy tries come behind the others: their `metrics` have `is_greedy`, and their `drop_reason`
    says so. A task that names a workflow is tried with its own. A try that raises, or takes longer
    than it may, becomes rows with that as their drop_reason, which have what was sampled until
    then, so that one bad task never stops the others.
    """
    rewards = Rewards(trying.rewards, seconds=trying.rollout_timeout)
    greedy = replace(trying, sampling=replace(trying.sampling, temperature=0.0))
    size = trying.group_size
    numbers = [None] if _is_of_group(task, trying) else range(size + trying.greedy_tries)
    jobs = [
        _rollout(task, policy, trying if (i or 0) < size else greedy, rewards, step, place, i)
        for i in numbers
    ]
    tries = [row for rollout in await asyncio.gather(*jobs) for row in rollout]
    tries = [_compared(one) if one.row.rollout >= size else one for one in tries]
    judged = iter(await rewards.of_group(task, [one.row for one in tries if one.is_to_judge]))
    made = [next(judged) if one.is_to_judge else one.row for one in tries]
    return as_judged(made, [one.follows for one in tries])


async def _rollout(
    task: Task,
    policy: Policy,
    trying: RolloutSpec,
    rewards: Rewards,
    step: int,
    place: int,
    number: int | None,
) -> list[RolloutRow]:
    """Make one try, again when it fails and may be made again, and stamp its rows.

    Without a number these are all tries of the group, which one workflow makes.
    """
    group = group_id(trying.run_id, step, place)
    tries: list[RolloutRow] = []
    attempt, failed = 0, True
    while failed and attempt <= trying.retries:
        seeded = _seeded(policy, trying, group, number, attempt)
        async with trying.places or nullcontext():
            started = perf_counter()
            tries, failed = await _run_once(task, seeded, trying)
        if not failed:
            trying.clock.note(perf_counter() - started)
        attempt += 1
    if attempt > 1:
        again = {"retries": attempt - 1.0}
        tries = [replace(t, row=replace(t.row, metrics={**t.row.metrics, **again})) for t in tries]
    judged = [
        replace(t, row=await rewards.of_row(task, t.row)) if t.is_to_judge else t for t in tries
    ]
    rows = named([one.row for one in judged], group, number)
    return [
        replace(one, row=replace(row, run_id=trying.run_id, step=step))
        for one, row in zip(judged, rows, strict=True)
    ]


def _is_of_group(task: Task, trying: RolloutSpec) -> bool:
    """Tell whether a task's workflow, under `@of_group`, makes all tries of a group itself."""
    try:
        own = workflow_of(task.workflow, trying.models) if task.workflow else trying.workflow
    except ConfigError:
        return False  # each try says why
    return looks_at(own) == "group"


def _seeded(
    policy: Policy, trying: RolloutSpec, group: str, number: int | None, attempt: int
) -> RolloutPolicy | GroupPolicies:
    """Return the policy as one try sees it, or those of all tries of a group."""
    if number is None:
        numbers = range(trying.group_size + trying.greedy_tries)
        greedy = replace(trying, sampling=replace(trying.sampling, temperature=0.0))
        kinds = [trying if i < trying.group_size else greedy for i in numbers]
        each = [_seeded(policy, kinds[i], group, i, attempt) for i in numbers]
        return GroupPolicies([one for one in each if isinstance(one, RolloutPolicy)])
    name = rollout_id(group, number)
    told_apart = f"{name}/{attempt}" if attempt else name
    return RolloutPolicy(policy, sampling=trying.sampling, seed=trying.seed, rollout=told_apart)


async def _run_once(
    task: Task, policy: RolloutPolicy | GroupPolicies, trying: RolloutSpec
) -> tuple[list[RolloutRow], bool]:
    """Run the workflow once; return its rows, and whether it failed."""
    stop = CancelScope()
    try:
        if cancel_reason():
            raise JobError("it was stopped before it began")
        own = workflow_of(task.workflow, trying.models) if task.workflow else trying.workflow
        with cancel_scope(stop):
            run = partial(with_models(own, trying.models), task, policy)
            work = asyncio.ensure_future(guard(run))
        made = await run_with_timeout(work, trying.clock.limit(trying.rollout_timeout), stop)
        rows = policy.finalize(check_rows(_rows(task, policy, made)))
        if not rows:
            raise JobError("it returned no experience")
    except Exception as error:  # noqa: BLE001 - the boundary to users' code: one bad try never stops a job
        outer = cancel_reason()
        reason, word = f"workflow failed: {one_line(error)}", finish_reason(error)
        if stop.reason or outer:
            reason, word = stop.reason or f"stopped: {outer}", "timeout" if stop.reason else "abort"
        failed = _failed(task, policy, reason, word)
        return [RolloutRow(row, is_to_judge=False) for row in failed], outer is None
    if stop.reason or cancel_reason():  # it returned in time what it had
        reason, word = (
            stop.reason or f"stopped: {cancel_reason()}",
            "timeout" if stop.reason else "abort",
        )
        rows = [replace(row, drop_reason=reason, finish_reason=word) for row in rows]
        return [RolloutRow(row, is_to_judge=False) for row in rows], bool(stop.reason)
    *before, last = rows
    if made is not None:
        return [RolloutRow(row, is_to_judge=_is_open(row)) for row in rows], False
    # one conversation, though its tokens do not continue each other: its end is what is judged
    following = [RolloutRow(row, is_to_judge=False, follows=True) for row in before]
    return [*following, RolloutRow(last, is_to_judge=True)], False


def _is_open(row: Experience) -> bool:
    """Tell whether a row waits for its reward: its workflow named none, nor a group of its own."""
    return row.reward is None and not row.rewards and row.group_id is None


def _rows(task: Task, policy: RolloutPolicy | GroupPolicies, made: Made) -> list[Experience]:
    """Return what a workflow returned as rows: with a reward alone, they are made of its turns."""
    if isinstance(made, Experience):
        return [made]
    if isinstance(made, list) and all(isinstance(row, Experience) for row in made):
        return made
    if made is not None and (not isinstance(made, Mapping | float | int) or made is True):
        raise JobError(f"it returned {made!r:.100}, expected rows, a reward, its parts, or nothing")
    rows = to_experiences(task, policy.turns)
    if made is None:
        return rows
    parts = dict(made) if isinstance(made, Mapping) else {"reward": float(made)}
    return [row.with_reward(parts) for row in rows]


def _failed(
    task: Task, policy: RolloutPolicy | GroupPolicies, reason: str, finish_reason: str
) -> list[Experience]:
    """Return the rows of a try that failed: what was sampled until then, or one that is empty."""
    nothing = Experience(
        task_id=task.task_id,
        messages=list(task.messages),
        prompt_text=task.prompt_text,
        policy_version=policy.version,
        num_turns=0,
    )
    rows = policy.finalize(to_experiences(task, policy.turns) or [nothing])
    why = reason[:LONGEST]
    return [replace(row, drop_reason=why, finish_reason=finish_reason) for row in rows]


def _compared(one: RolloutRow) -> RolloutRow:
    """Mark a greedy try, which others of its group are compared with."""
    reason = one.row.drop_reason or "greedy: others of its group are compared with it"
    metrics = {**one.row.metrics, "is_greedy": 1.0}
    return replace(one, row=replace(one.row, drop_reason=reason, metrics=metrics))
