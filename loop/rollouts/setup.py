"""From a run's configuration to the workers that run its groups."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ...operators import resolve as resolve_operator
from ...operators.concurrency import run_apart
from ...operators.import_path import taken_apart
from ...operators.source_digest import digest
from ...pipelines.inline import Chain
from ...store import Store, Task
from ..algorithms import Algorithm, resolve
from ..config import ExplorerConfig, RunConfig, SamplingConfig
from ..inference.build import close, start_auxiliary, start_policy
from ..inference.policy import Policy, Sampling
from ..trajectories.rewards import rewards_of
from .group import RolloutSpec, workflow_of
from .timeouts import RolloutTimer
from .workers import LocalWorker


def sampling(config: SamplingConfig) -> Sampling:
    """Return the sampling of a configuration; each rollout sets its seed."""
    return Sampling(**dict(config))


class RolloutSpecs:
    """How a job runs each task: by its taskset's settings, or else by the explorer's."""

    def __init__(
        self,
        config: RunConfig,
        *,
        max_concurrent_rollouts: int | None = None,
        models: Mapping[str, Policy] | None = None,
    ) -> None:
        """Take a configuration; a worker's share of the concurrent rollouts replaces its number.

        `models` are the auxiliary models that are started already.
        """
        explorer = config.explorer or ExplorerConfig()
        most = max_concurrent_rollouts or explorer.max_concurrent_rollouts
        self._config = config
        self._slots = asyncio.Semaphore(most) if most else None
        self._known: dict[str, RolloutSpec] = {}
        self.models: dict[str, Policy] = dict(models or {})
        """Auxiliary models by the names of the workflows' parameters."""

    def of(self, task: Task) -> RolloutSpec:
        """Return how a task is run to train on its rollouts."""
        if task.taskset not in self._known:  # kept, since a spec has the times of its rollouts
            algorithm, section = self._algorithm, self._config.explorer_for(task.taskset)
            self._known[task.taskset] = replace(
                self._spec(section, section.group_size or algorithm.group_size),
                greedy_rollouts=algorithm.greedy_rollouts,
                timer=RolloutTimer(**dict(section.adaptive_timeout or {})),
            )
        return self._known[task.taskset]

    def for_evaluation(self, task: Task, run_id: str) -> RolloutSpec:
        """Return how an evaluation, whose rows have this run_id, runs a task.

        The adaptive timeout neither applies to these rollouts nor counts them.
        """
        section = self._config.evaluation_for(task.taskset)
        spec = self._spec(section, section.group_size or 1)
        return replace(spec, run_id=run_id, purpose="eval")

    def _spec(self, section: ExplorerConfig, group_size: int) -> RolloutSpec:
        return RolloutSpec(
            workflow=workflow_of(section.workflow, section.auxiliary_models),
            rewards=rewards_of(section.rewards),
            group_size=group_size,
            sampling=sampling(section.sampling),
            seed=self._config.seed,
            run_id=self._config.name,
            rollout_timeout=section.rollout_timeout,
            retries=section.max_retries,
            system_prompt=section.system_prompt,
            models=self.models,
            slots=self._slots,
        )

    @cached_property
    def _algorithm(self) -> Algorithm:
        return resolve(self._config.algorithm)


def used_functions(config: RunConfig, job: str) -> dict[str, str]:
    """Return the digests of the functions that a job runs: workflows, rewards and operators.

    A trainer runs only operators, and need not have the others installed.
    """
    if job == "train":
        return dict(Chain([resolve_operator(spec) for spec in config.trainer.operators]).functions)
    found: dict[str, set[str]] = {}
    for section in (config.explorers if job == "explore" else config.evaluations).values():
        name, _ = taken_apart(section.workflow, "a workflow")
        made = digest(workflow_of(section.workflow, section.auxiliary_models))
        found.setdefault(f"workflow:{name}", set()).add(made)
        for name, part in rewards_of(section.rewards).items():
            found.setdefault(f"reward:{name}", set()).add(digest(part.function))
    # several digests: tasksets give one function different parameters
    used = {name: ", ".join(sorted(digests)) for name, digests in found.items()}
    if job == "explore" and config.explorer is not None:
        used |= Chain([resolve_operator(spec) for spec in config.explorer.operators]).functions
    return used


def start_worker(
    config: RunConfig, specs: RolloutSpecs, folder: Path, store: Store | None = None
) -> LocalWorker:
    """Start a worker in this process; images are read from the store."""
    explorer = config.explorer or ExplorerConfig()
    auxiliary = start_auxiliary(explorer.auxiliary_models, seed=config.seed, store=store)
    # In place: the specs of all tasksets share this dictionary.
    specs.models.update(auxiliary)
    given = sampling(explorer.sampling)
    try:
        policy = start_policy(explorer.engine, folder, config.model, sampling=given, store=store)
    except BaseException:
        run_apart(close(auxiliary.values()))
        raise
    return LocalWorker(policy, specs.of, specs.for_evaluation, auxiliary=auxiliary.values())
