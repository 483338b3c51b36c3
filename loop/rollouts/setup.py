"""From a run's configuration to the workers that run its groups."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...operators import resolve
from ...operators.async_map import run_apart
from ...operators.source_digest import digest
from ...pipelines.inline import Chain
from ...store import Task
from ..config import EvaluateConfig, ExplorerConfig, RunConfig, SamplingConfig
from ..inference.build import close, start_auxiliary, start_policy
from ..inference.policy import Sampling
from ..trajectories.rewards import rewards_of
from .group import RolloutSpec, workflow_of
from .timeouts import RolloutTimer
from .workers import LocalWorker


def sampling(config: SamplingConfig) -> Sampling:
    """Return the sampling of a configuration; each rollout sets its seed."""
    return Sampling(**dict(config))


def rollout_spec(config: RunConfig, group_size: int, *, greedy_rollouts: int = 0) -> RolloutSpec:
    """Return how a job of this configuration runs tasks."""
    explorer = config.explorer or ExplorerConfig()
    adaptive, most = explorer.adaptive_timeout, explorer.max_concurrent_rollouts
    return RolloutSpec(
        workflow=workflow_of(explorer.workflow, explorer.auxiliary_models),
        rewards=rewards_of(explorer.rewards),
        group_size=group_size,
        greedy_rollouts=greedy_rollouts,
        sampling=sampling(explorer.sampling),
        seed=config.seed,
        run_id=config.name,
        rollout_timeout=explorer.rollout_timeout,
        retries=explorer.max_retries,
        slots=asyncio.Semaphore(most) if most else None,
        timer=RolloutTimer(**dict(adaptive or {})),
    )


def used_functions(config: RunConfig, job: str) -> dict[str, str]:
    """Return the digests of the functions that a job runs: workflow, rewards and operators.

    A trainer runs only operators, and need not have the others installed.
    """
    if job == "train":
        return dict(Chain([resolve(spec) for spec in config.trainer.operators]).functions)
    explorer = config.explorer or ExplorerConfig()
    workflow = explorer.workflow
    name = workflow if isinstance(workflow, str) else next(iter(workflow))
    used = {f"workflow:{name}": digest(workflow_of(workflow, explorer.auxiliary_models))}
    for name, (reward, _) in rewards_of(explorer.rewards).items():
        used[f"reward:{name}"] = digest(reward)
    if job == "explore":
        used |= Chain([resolve(spec) for spec in explorer.operators]).functions
    return used


def eval_spec(settings: EvaluateConfig, spec: RolloutSpec, task: Task, run_id: str) -> RolloutSpec:
    """Return how an evaluation, whose rows have this run_id, runs a task.

    The adaptive timeout neither applies to these rollouts nor counts them.
    """
    own = settings.of(task.taskset)
    return replace(
        spec,
        group_size=own.group_size,
        greedy_rollouts=0,
        sampling=sampling(own.sampling),
        run_id=run_id,
        purpose="eval",
        timer=RolloutTimer(),
    )


def start_worker(config: RunConfig, spec: RolloutSpec, folder: Path) -> LocalWorker:
    """Start a worker in this process."""
    explorer = config.explorer or ExplorerConfig()
    auxiliary = start_auxiliary(explorer.auxiliary_models, seed=config.seed)
    # In place: the copies of `spec` for evaluations share this dictionary.
    spec.models.update(auxiliary)
    try:
        policy = start_policy(explorer.engine, folder, config.model, sampling=spec.sampling)
    except BaseException:
        run_apart(close(auxiliary.values()))
        raise
    for_eval = partial(eval_spec, config.evaluate or EvaluateConfig(), spec)
    return LocalWorker(policy, spec, auxiliary=auxiliary.values(), eval_spec=for_eval)
