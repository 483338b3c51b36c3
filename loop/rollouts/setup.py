"""From a run's configuration to the runners that try its groups."""

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
from ..inference.build import answering, close, others
from ..inference.policy import Sampling
from ..trajectories.rewards import rewards_of
from .group import RolloutSpec, workflow_of
from .timeouts import RolloutTimer
from .workers import LocalWorker


def sampling(config: SamplingConfig) -> Sampling:
    """Return a configuration's way of sampling; the seed comes with each rollout."""
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=config.max_tokens,
        stop=config.stop,
    )


def trying(config: RunConfig, group_size: int, *, greedy_tries: int = 0) -> RolloutSpec:
    """Return how the tasks of a run are tried."""
    explorer = config.explorer or ExplorerConfig()
    dynamic = explorer.adaptive_timeout
    return RolloutSpec(
        workflow=workflow_of(explorer.workflow, explorer.auxiliary_models),
        rewards=rewards_of(explorer.rewards),
        group_size=group_size,
        greedy_tries=greedy_tries,
        sampling=sampling(explorer.sampling),
        seed=config.seed,
        run_id=config.name,
        rollout_timeout=explorer.rollout_timeout,
        retries=explorer.max_retries,
        places=asyncio.Semaphore(explorer.max_concurrent_rollouts)
        if explorer.max_concurrent_rollouts
        else None,
        clock=RolloutTimer(dynamic.multiplier, dynamic.min_samples) if dynamic else RolloutTimer(),
    )


def used_functions(config: RunConfig, job: str) -> dict[str, str]:
    """Return what a job runs of users' code: workflow, rewards and operators, by their digests.

    A trainer runs operators only, and need not have the others installed.
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


def measuring(settings: EvaluateConfig, how: RolloutSpec, task: Task, run_id: str) -> RolloutSpec:
    """Return how a task is tried for a measurement whose rows have this run_id.

    No limit that follows how long tries take holds, nor counts these.
    """
    own = settings.of(task.taskset)
    return replace(
        how,
        group_size=own.group_size,
        greedy_tries=0,
        sampling=sampling(own.sampling),
        run_id=run_id,
        clock=RolloutTimer(),
    )


def start_runner(config: RunConfig, how: RolloutSpec, folder: Path) -> LocalWorker:
    """Start a runner in this process."""
    explorer = config.explorer or ExplorerConfig()
    beside = others(explorer.auxiliary_models, seed=config.seed)
    how.models.update(beside)
    try:
        policy = answering(explorer.engine, folder, config.model, sampling=how.sampling)
    except BaseException:
        run_apart(close(beside.values()))
        raise
    settings = config.evaluate or EvaluateConfig()
    message = partial(measuring, settings, how)
    return LocalWorker(policy, how, beside=beside.values(), measuring=message)
