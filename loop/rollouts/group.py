"""Run groups of rollouts: workflow, rewards and ids make the rows of a group."""

import asyncio
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, cast

from ...operators.import_path import find_function, taken_apart
from ...operators.reward_protocol import looks_at, parameters, with_parameters
from ...operators.user_errors import one_line
from ...store.errors import ConfigError, JobError, OperatorError
from ...store.ids import group_id, rollout_id
from ...store.records import Experience, Task
from .. import workflows as workflow_module
from ..inference.cancellation import CancelScope, cancel_reason, cancel_scope
from ..inference.policy import Policy, Sampling
from ..trajectories.group import GroupPolicies, as_judged, named
from ..trajectories.rewards import LONGEST, RewardPart, Rewards
from ..trajectories.trajectory import RolloutPolicy, finish_reason, no_answer, to_experiences
from ..trajectories.user_code import check_rows, guard
from ..workflows import Made, Workflow
from .sampled_group import is_one_request, sample_group
from .timeouts import RolloutTimer, cut_short, run_with_timeout

WorkflowSpec = str | Mapping[str, Mapping[str, Any] | None]
"""A workflow by name, or `{name: {parameter: value}}`."""


def workflow_of(
    spec: WorkflowSpec, models: Collection[str] | Mapping[str, Policy] = ()
) -> Workflow:
    """Return the workflow that a configuration names, with its parameters.

    Parameters named like one of the auxiliary `models` are filled in later. Raises ConfigError for
    an unknown name, or parameters that do not fit.
    """
    name, given = taken_apart(spec, "a workflow")
    found = find_function(name, workflow_module, "workflow")
    try:
        made = with_parameters(name, found, given, what="workflow", others=models)
    except OperatorError as error:
        raise ConfigError(str(error)) from error
    return cast(Workflow, made)


def with_models(workflow: Workflow, models: Mapping[str, Policy]) -> Workflow:
    """Bind the models that a workflow takes as parameters."""
    if not models:
        return workflow  # a signature takes longer to read than a short rollout's other work
    known = parameters(workflow)
    wanted = {n: m for n, m in models.items() if known is None or n in known}
    return partial(workflow, **wanted) if wanted else workflow


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """How a job runs the tasks of a taskset."""

    workflow: Workflow
    rewards: Mapping[str, RewardPart]
    group_size: int
    sampling: Sampling
    seed: int
    run_id: str
    purpose: str = "train"
    """`eval` for rows that only evaluate a policy."""
    system_prompt: str | None = None
    """The system message of tasks that have none."""
    greedy_rollouts: int = 0
    """Further rollouts at temperature 0, for comparison and not for training."""
    rollout_timeout: float | None = None
    """Longest time of a rollout, and of a reward, in seconds."""
    retries: int = 0
    """How often a rollout that raised or timed out is repeated."""
    models: Mapping[str, Policy] = field(default_factory=dict)
    """Auxiliary models by the names of the workflow's parameters."""
    slots: asyncio.Semaphore | None = None
    """Bounds the concurrent rollouts."""
    timer: RolloutTimer = field(default_factory=RolloutTimer)
    """Times of earlier rollouts, for the adaptive timeout."""


@dataclass(frozen=True)
class RolloutRow:
    """A row of a rollout, and whether its reward is yet to be computed."""

    row: Experience
    is_to_judge: bool
    follows: bool = False
    """Whether it gets the reward of the rollout's last row, since its turns became several rows."""


async def run_group(
    task: Task, policy: Policy, spec: RolloutSpec, *, batch: int, group_index: int
) -> list[Experience]:
    """Run all rollouts of a group concurrently, and return the rows in order.

    Greedy rollouts come last, with `is_greedy` in `metrics` and a `drop_reason`. A task may name
    its own workflow. A rollout that raises or times out becomes rows with what was sampled until
    then and the error as `drop_reason`, so one bad task never stops the others.
    """
    rewards = Rewards(spec.rewards, seconds=spec.rollout_timeout)
    size = spec.group_size
    rollouts = await _sampled(task, policy, spec, rewards, batch, group_index)
    if rollouts is None:
        numbers = [None] if _is_of_group(task, spec) else range(size + spec.greedy_rollouts)
        jobs = [_rollout(task, policy, spec, rewards, batch, group_index, i) for i in numbers]
        rollouts = [row for rollout in await asyncio.gather(*jobs) for row in rollout]
    rollouts = [_compared(one) if one.row.rollout_index >= size else one for one in rollouts]
    judged = iter(await rewards.of_group(task, [one.row for one in rollouts if one.is_to_judge]))
    made = [next(judged) if one.is_to_judge else one.row for one in rollouts]
    return as_judged(made, [one.follows for one in rollouts])


async def _sampled(
    task: Task, policy: Policy, spec: RolloutSpec, rewards: Rewards, batch: int, group_index: int
) -> list[RolloutRow] | None:
    """Run rollouts of one request each; None if they have to be run one by one."""
    # With slots or retries, rollouts begin and end at times of their own.
    if task.workflow or spec.slots or spec.retries:
        return None
    if not is_one_request(policy, spec.workflow):
        return None
    group = group_id(spec.run_id, batch, group_index)
    numbers = range(spec.group_size + spec.greedy_rollouts)
    policies = [_rollout_policy(policy, spec, group, i) for i in numbers]
    judged: dict[int, Experience | asyncio.Future[Experience]] = {}
    is_judged: dict[int, bool] = {}

    def deliver(number: int, row: Experience) -> None:
        is_judged[number] = not row.drop_reason
        begun = rewards.begin(task, row) if is_judged[number] else row
        judged[number] = begun if isinstance(begun, Experience) else asyncio.ensure_future(begun)

    shown, how = _instructed(task, spec), {"timer": spec.timer, "timeout": spec.rollout_timeout}
    try:
        if not await sample_group(shown, policy, policies, deliver, **how):
            return None
        waiting = [one for one in judged.values() if not isinstance(one, Experience)]
        await asyncio.gather(*waiting)
    finally:  # where this is cancelled
        for one in judged.values():
            if not isinstance(one, Experience):
                one.cancel()
    where = {"run_id": spec.run_id, "batch": batch, "group_index": group_index}
    made: list[RolloutRow] = []
    for number in numbers:
        row = judged[number]
        rows = [row if isinstance(row, Experience) else row.result()]
        [one] = named(rows, group, number, purpose=spec.purpose, **where)
        made.append(RolloutRow(one, is_to_judge=is_judged[number]))
    return made


async def _rollout(
    task: Task,
    policy: Policy,
    spec: RolloutSpec,
    rewards: Rewards,
    batch: int,
    group_index: int,
    number: int | None,
) -> list[RolloutRow]:
    """Run one rollout with its retries; None runs the whole group, under `@of_group`."""
    group = group_id(spec.run_id, batch, group_index)
    rollouts: list[RolloutRow] = []
    attempt, failed = 0, True
    while failed and attempt <= spec.retries:
        own = _policies(policy, spec, group, number, attempt)
        # Not around the rewards below: a slow judge must not take the place of a rollout.
        async with spec.slots or nullcontext():
            started = perf_counter()
            rollouts, failed = await _run_once(task, own, spec)
        if not failed:
            # without failures, which would pull the adaptive timeout down
            spec.timer.note(perf_counter() - started)
        attempt += 1
    if attempt > 1:
        again = {"retries": attempt - 1.0}
        rollouts = [
            replace(t, row=t.row.updated(metrics={**t.row.metrics, **again})) for t in rollouts
        ]
    judged = [
        await rewards.of_row(task, one.row) if one.is_to_judge else one.row for one in rollouts
    ]
    where = {"run_id": spec.run_id, "batch": batch, "group_index": group_index}
    rows = named(judged, group, number, purpose=spec.purpose, **where)
    return [
        RolloutRow(row, is_to_judge=one.is_to_judge, follows=one.follows)
        for one, row in zip(rollouts, rows, strict=True)
    ]


def _instructed(task: Task, spec: RolloutSpec) -> Task:
    """Return a task with the system prompt of its taskset, unless it has one; the id stays."""
    has_one = bool(task.messages) and task.messages[0].get("role") == "system"
    if spec.system_prompt is None or has_one:
        return task
    system = {"role": "system", "content": spec.system_prompt}
    made = replace(task, messages=[system, *task.messages])
    vars(made)["task_id"] = task.task_id  # the rows are of the task as it is stored
    return made


def _workflow(task: Task, spec: RolloutSpec) -> Workflow:
    return workflow_of(task.workflow, spec.models) if task.workflow else spec.workflow


def _is_of_group(task: Task, spec: RolloutSpec) -> bool:
    try:
        return looks_at(_workflow(task, spec)) == "group"
    except ConfigError:
        return False  # raised again by each rollout, whose row then has the error


def _policies(
    policy: Policy, spec: RolloutSpec, group: str, number: int | None, attempt: int
) -> RolloutPolicy | GroupPolicies:
    """Return the policy of one rollout, or the policies of all rollouts of a group."""
    numbers = range(spec.group_size + spec.greedy_rollouts) if number is None else [number]
    made = [_rollout_policy(policy, spec, group, i, attempt) for i in numbers]
    return GroupPolicies(made) if number is None else made[0]


def _rollout_policy(
    policy: Policy, spec: RolloutSpec, group: str, number: int, attempt: int = 0
) -> RolloutPolicy:
    sampling = spec.sampling
    if number >= spec.group_size:
        sampling = replace(sampling, temperature=0.0)
    # a retry samples with another seed, else it would fail in the same way
    name = f"{rollout_id(group, number)}/{attempt}" if attempt else rollout_id(group, number)
    return RolloutPolicy(policy, sampling=sampling, seed=spec.seed, rollout=name)


async def _run_once(
    task: Task, policy: RolloutPolicy | GroupPolicies, spec: RolloutSpec
) -> tuple[list[RolloutRow], bool]:
    """Run the workflow once; return its rows, and whether it failed."""
    timeout = CancelScope()
    try:
        if cancel_reason():
            raise JobError("it was stopped before it began")
        workflow, shown = with_models(_workflow(task, spec), spec.models), _instructed(task, spec)
        with cancel_scope(timeout):
            # Created inside the scope, because a task keeps the context in which it is created.
            work = asyncio.ensure_future(guard(partial(workflow, shown, policy)))
        made = await run_with_timeout(work, spec.timer.limit(spec.rollout_timeout), timeout)
        rows = policy.finalize(check_rows(_rows(shown, policy, made)))
        if not rows:
            raise JobError("it returned no experience")
    except Exception as error:  # noqa: BLE001 - the boundary to users' code: one bad rollout never stops a job
        failure = f"workflow failed: {one_line(error)}", finish_reason(error)
        failed = _failed(task, policy, *(cut_short(timeout) or failure))
        # a rollout that was cancelled from outside is not retried
        return [RolloutRow(row, is_to_judge=False) for row in failed], cancel_reason() is None
    if (why := cut_short(timeout)) is not None:  # it returned what it had within the grace period
        rows = [row.updated(drop_reason=why[0], finish_reason=why[1]) for row in rows]
        return [RolloutRow(row, is_to_judge=False) for row in rows], why[1] == "timeout"
    *before, last = rows
    if made is not None:
        return [RolloutRow(row, is_to_judge=_is_open(row)) for row in rows], False
    # One conversation, even if its tokens do not continue each other: its end is judged.
    following = [RolloutRow(row, is_to_judge=False, follows=True) for row in before]
    return [*following, RolloutRow(last, is_to_judge=True)], False


def _is_open(row: Experience) -> bool:
    """Return whether the configured rewards judge a row: it has no reward, and no subgroup."""
    return row.reward is None and not row.rewards and row.group_id is None


def _rows(task: Task, policy: RolloutPolicy | GroupPolicies, made: Made) -> list[Experience]:
    """Return a workflow's rows; if it returned only a reward, they are built from its turns."""
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
    """Return the rows of a failed rollout: what was sampled until then, or an empty one."""
    made = to_experiences(task, policy.turns) or [no_answer(task, policy.version)]
    rows = policy.finalize(made)
    why = reason[:LONGEST]
    return [row.updated(drop_reason=why, finish_reason=finish_reason) for row in rows]


def _compared(one: RolloutRow) -> RolloutRow:
    """Mark a greedy rollout, with which the others of its group are compared."""
    reason = one.row.drop_reason or "greedy: others of its group are compared with it"
    metrics = {**one.row.metrics, "is_greedy": 1.0}
    return replace(one, row=one.row.updated(drop_reason=reason, metrics=metrics))
