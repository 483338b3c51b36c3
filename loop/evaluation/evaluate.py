"""Evaluate policies on held-out tasks; every rollout is a row under a run_id of its own."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...operators.concurrency import run_apart
from ...store import Experience, Store, Task
from ...store.errors import JobError
from ..config import EvaluateConfig, RunConfig
from ..inference.policy import Policy
from ..rollouts.group import run_group
from ..rollouts.setup import RolloutSpecs, sampling, used_functions
from ..rollouts.writer import store_rows
from ..runs.job import Job, job, recorded
from ..runs.metrics import Listener, Metrics
from ..tasks.prepare import prepare_tasks
from .history import evaluated_before, rollout_scores, rows_id
from .paired_test import PairedTest, paired
from .policies import EvaluatedPolicy, PolicyPool, every_checkpoint, subject, with_models
from .result import Evaluation, evaluation
from .tasks import evaluation_tasks, labeled


@dataclass(frozen=True)
class Comparison:
    """Two policies, evaluated on the same tasks with the same settings."""

    a: Evaluation
    b: Evaluation
    paired: PairedTest


def evaluate(
    store: Store,
    config: RunConfig,
    *,
    version: int | None = None,
    model: str | Path | None = None,
    listener: Listener | None = None,
    title: str | None = None,
    rerun: bool = True,
) -> Evaluation:
    """Evaluate the run's newest policy, another version, or a model on `evaluate.where`.

    The rows of each evaluation have their own run_id, so that no trainer draws them and a version
    can be evaluated again with other settings. Without `rerun`, an earlier evaluation with the same
    settings is returned. Rows of a given `model` or endpoint have no policy version; their metadata
    name the model. `title` is the job's name in `runs`. Raises JobError when no rollout could be
    scored.
    """
    one = subject(store, config, version, model)
    [found] = evaluate_policies(store, config, [one], listener=listener, title=title, rerun=rerun)
    return found


def evaluate_checkpoints(
    store: Store, config: RunConfig, *, listener: Listener | None = None, rerun: bool = False
) -> list[Evaluation]:
    """Evaluate all versions of the run whose weights still exist, oldest first."""
    subjects = every_checkpoint(store, config)
    return evaluate_policies(store, config, subjects, listener=listener, rerun=rerun)


def compare(
    store: Store,
    config: RunConfig,
    a: int | str | Path,
    b: int | str | Path,
    *,
    listener: Listener | None = None,
    rerun: bool = False,
) -> Comparison:
    """Evaluate two versions (numbers) or models (folders), and compare them task by task."""
    both = [
        subject(store, config, *((one, None) if isinstance(one, int) else (None, one)))
        for one in (a, b)
    ]
    first, second = evaluate_policies(store, config, both, listener=listener, rerun=rerun)
    scores = [rollout_scores(store, one.run_id).scores for one in (first, second)]
    return Comparison(first, second, paired(*scores, seed=config.seed))


def evaluate_policies(
    store: Store,
    config: RunConfig,
    subjects: Sequence[EvaluatedPolicy],
    *,
    listener: Listener | None = None,
    title: str | None = None,
    rerun: bool = True,
) -> list[Evaluation]:
    """Evaluate policies one after the other, on the same tasks."""
    settings = config.evaluate or EvaluateConfig()
    if config.threads:
        torch.set_num_threads(config.threads)
    prepare_tasks(store, config.tasks)
    tasks = evaluation_tasks(store, settings)
    config = with_models(store, config)
    pool = PolicyPool(store, config, sampling=sampling(settings.sampling))
    found = []
    try:
        for one in subjects:
            functions = used_functions(config, "evaluate")
            with job(
                store, config, "evaluate", resume=True, title=title, functions=functions
            ) as mine:
                found.append(_evaluated(mine, one, tasks, pool, listener, rerun=rerun))
    finally:
        pool.close()
    return found


def _evaluated(
    mine: Job,
    one: EvaluatedPolicy,
    tasks: Sequence[Task],
    pool: PolicyPool,
    listener: Listener | None,
    *,
    rerun: bool,
) -> Evaluation:
    settings, seed = mine.config.evaluate or EvaluateConfig(), mine.config.seed
    before = None if rerun else evaluated_before(mine, one, [task.task_id for task in tasks])
    if before is not None:
        found = rollout_scores(mine.store, before)
        return evaluation(settings, tasks, one, before, found, seed=seed, is_from_before=True)
    with recorded(mine, start_step=0):
        run_id = rows_id(mine.run_id, mine.attempt)
        _run_rollouts(mine, one, tasks, pool, run_id)
        found = rollout_scores(mine.store, run_id)
        if not any(found.scores.values()):
            why = found.last_reason or "the reward returned nothing"
            raise JobError(f"none of {found.num_rows} rollouts could be scored; the last: {why}")
        result = evaluation(settings, tasks, one, run_id, found, seed=seed)
        numbers = result.numbers
        if one.model is None:
            with Metrics(mine).shown(start_step=None) as metrics:
                # Only of the run's versions: metrics have a step, which another model does not.
                metrics.add(one.version or 0, numbers)
    if listener:
        listener("evaluate", one.version or 0, numbers)
    return result


def _run_rollouts(
    mine: Job, one: EvaluatedPolicy, tasks: Sequence[Task], pool: PolicyPool, run_id: str
) -> None:
    settings = mine.config.evaluate or EvaluateConfig()
    policy: Policy = pool.policy(one)
    # Numbered across batches, so that the ids of groups do not depend on `batch_size`.
    placed = list(enumerate(tasks))
    for start in range(0, len(placed), settings.batch_size):
        specs = RolloutSpecs(mine.config, models=pool.others)
        chunk = placed[start : start + settings.batch_size]
        made = run_apart(_run_tasks(chunk, policy, specs, run_id, batch=one.version or 0))
        splits = {task.task_id: task.split for _, task in chunk}
        store_rows(
            mine.store,
            [labeled(row, splits.get(row.task_id or ""), model=one.model) for row in made],
        )


async def _run_tasks(
    placed: Sequence[tuple[int, Task]],
    policy: Policy,
    specs: RolloutSpecs,
    run_id: str,
    *,
    batch: int,
) -> list[Experience]:
    """Run tasks concurrently, each with its taskset's settings; return the rows in order."""
    groups = (
        run_group(task, policy, specs.for_evaluation(task, run_id), batch=batch, group_index=i)
        for i, task in placed
    )
    return [row for rows in await asyncio.gather(*groups) for row in rows]
