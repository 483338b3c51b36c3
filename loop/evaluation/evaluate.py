"""How good a policy is on tasks it was not trained on: every try is a row, kept apart."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...operators.async_map import run_apart
from ...store import Experience, Store, Task
from ...store.errors import JobError
from ..config import EvaluateConfig, RunConfig
from ..inference.policy import Policy
from ..rollouts.group import RolloutSpec, run_group
from ..rollouts.setup import measuring, sampling, trying, used_functions
from ..runs.job import Job, job, recorded
from ..runs.metrics import Listener, Metrics
from ..tasks.select import prepare
from ..trajectories.rows import store_rows
from .history import measured_before, rows_id, tries
from .paired_test import PairedTest, paired
from .policies import EvaluatedPolicy, PolicyPool, every_checkpoint, subject, with_models
from .result import Evaluation, evaluation
from .tasks import labelled, measured_tasks


@dataclass(frozen=True)
class Comparison:
    """Two policies, measured on the same tasks in the same way."""

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
    again: bool = True,
) -> Evaluation:
    """Try the tasks of `evaluate.where` with the run's newest policy, another version, or a model.

    Each evaluation has a run_id of its own for its rows, so that no trainer draws them, and the
    same version can be measured again in another way; unless `again`, what was measured before in
    the same way is not. Rows of a given `model`, or an endpoint's, have no policy version; their
    metadata say which model it is. `title` is what `runs` calls the job. Raises JobError when no
    try could be scored.
    """
    one = subject(store, config, version, model)
    [found] = measure(store, config, [one], listener=listener, title=title, again=again)
    return found


def evaluate_checkpoints(
    store: Store, config: RunConfig, *, listener: Listener | None = None, again: bool = False
) -> list[Evaluation]:
    """Measure all versions of the run whose weights are still there, oldest first."""
    subjects = every_checkpoint(store, config)
    return measure(store, config, subjects, listener=listener, again=again)


def compare(
    store: Store,
    config: RunConfig,
    a: int | str | Path,
    b: int | str | Path,
    *,
    listener: Listener | None = None,
    again: bool = False,
) -> Comparison:
    """Measure two versions (numbers) or models (folders), and compare them task by task."""
    both = [
        subject(store, config, *((one, None) if isinstance(one, int) else (None, one)))
        for one in (a, b)
    ]
    first, second = measure(store, config, both, listener=listener, again=again)
    scores = [tries(store, one.run_id).scores for one in (first, second)]
    return Comparison(first, second, paired(*scores, seed=config.seed))


def measure(
    store: Store,
    config: RunConfig,
    subjects: Sequence[EvaluatedPolicy],
    *,
    listener: Listener | None = None,
    title: str | None = None,
    again: bool = True,
) -> list[Evaluation]:
    """Measure policies one after the other, on the same tasks."""
    settings = config.evaluate or EvaluateConfig()
    if config.threads:
        torch.set_num_threads(config.threads)
    prepare(store, config.tasks)
    tasks = measured_tasks(store, settings)
    config = with_models(store, config)
    who = PolicyPool(store, config, sampling=sampling(settings.sampling))
    found = []
    try:
        for one in subjects:
            functions = used_functions(config, "evaluate")
            with job(
                store, config, "evaluate", resume=True, title=title, functions=functions
            ) as mine:
                found.append(_measured(mine, one, tasks, who, listener, again=again))
    finally:
        who.close()
    return found


def _measured(
    mine: Job,
    one: EvaluatedPolicy,
    tasks: Sequence[Task],
    who: PolicyPool,
    listener: Listener | None,
    *,
    again: bool,
) -> Evaluation:
    settings, seed = mine.config.evaluate or EvaluateConfig(), mine.config.seed
    before = None if again else measured_before(mine, one, [task.task_id for task in tasks])
    if before is not None:
        found = tries(mine.store, before)
        return evaluation(settings, tasks, one, before, found, seed=seed, is_from_before=True)
    with recorded(mine, start_step=0):
        run_id = rows_id(mine.run_id, mine.attempt)
        _run_rollouts(mine, one, tasks, who, run_id)
        found = tries(mine.store, run_id)
        if not any(found.scores.values()):
            why = found.last_reason or "the reward gave nothing"
            raise JobError(f"none of {found.num_rows} tries could be scored; the last: {why}")
        said = evaluation(settings, tasks, one, run_id, found, seed=seed)
        measured = said.numbers
        if one.model is None:
            with Metrics(mine).shown(start_step=None) as metrics:
                metrics.add(one.version or 0, measured)
    if listener:
        listener("evaluate", one.version or 0, measured)
    return said


def _run_rollouts(
    mine: Job, one: EvaluatedPolicy, tasks: Sequence[Task], who: PolicyPool, run_id: str
) -> None:
    """Try all tasks, and store the rows of each part of them."""
    settings = mine.config.evaluate or EvaluateConfig()
    policy: Policy = who.policy(one)
    placed = list(enumerate(tasks))
    for start in range(0, len(placed), settings.batch_size):
        how = replace(trying(mine.config, settings.group_size), models=who.others)
        chunk = placed[start : start + settings.batch_size]
        made = run_apart(_tried(chunk, policy, how, settings, run_id, step=one.version or 0))
        splits = {task.task_id: task.split for _, task in chunk}
        store_rows(
            mine.store,
            [labelled(row, splits.get(row.task_id or ""), model=one.model) for row in made],
        )


async def _tried(
    placed: Sequence[tuple[int, Task]],
    policy: Policy,
    how: RolloutSpec,
    settings: EvaluateConfig,
    run_id: str,
    *,
    step: int,
) -> list[Experience]:
    """Try tasks, all at once, each as its taskset says; return the rows in order."""
    groups = (
        run_group(task, policy, measuring(settings, how, task, run_id), step=step, place=i)
        for i, task in placed
    )
    return [row for rows in await asyncio.gather(*groups) for row in rows]
