"""How good a policy is on tasks it was not trained on: every try is a row, kept apart."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..store import Experience, Store
from ..store.errors import ConfigError, JobError
from .config import EvaluateConfig, RunConfig
from .explorer import Listener, sampling
from .metrics import Metrics
from .models import load, load_folder, put
from .rollouts import rewards_of, store_rows, try_tasks, workflow_of
from .runs import job, recorded, run_folder
from .tasks import prepare, select
from .transformers_policy import TransformersPolicy
from .weights import newest, published


@dataclass(frozen=True)
class Evaluation:
    """What was measured: the share of scored tries with reward 1 or more, and where they are."""

    accuracy: float
    reward_mean: float
    num_tasks: int
    num_rows: int
    num_unscored: int
    """Tries whose reward could not be computed; they count neither as right nor as wrong."""
    policy_version: int | None
    """None for a model that the run did not make."""
    run_id: str
    """The run_id of the rows in `experiences`."""


def evaluate(
    store: Store,
    config: RunConfig,
    *,
    version: int | None = None,
    model: str | Path | None = None,
    listener: Listener | None = None,
) -> Evaluation:
    """Try the tasks of `evaluate.where` with the run's newest policy, another version, or a model.

    Each evaluation has a run_id of its own for its rows, so that no trainer draws them, and the
    same version can be measured again in another way. Rows of a given `model` have no policy
    version; their metadata says where it lies. Raises JobError when no try could be scored.
    """
    settings = config.evaluate or EvaluateConfig()
    prepare(store, config.tasks)
    tasks = select(store, settings.where)
    with job(store, config, "evaluate", resume=True) as mine, recorded(mine, start_step=0):
        policy = _policy(store, config, version, model)
        run_id = f"{config.name}:eval-{mine.attempt:03d}"
        rewards = config.explorer.rewards if config.explorer else "exact_match"
        workflow = config.explorer.workflow if config.explorer else "single_turn"
        rows = []
        for start in range(0, len(tasks), settings.batch_tasks):
            chunk = list(enumerate(tasks))[start : start + settings.batch_tasks]
            made = asyncio.run(
                try_tasks(
                    chunk,
                    policy,
                    workflow=workflow_of(workflow),
                    rewards=rewards_of(rewards),
                    group_size=settings.group_size,
                    sampling=sampling(settings.sampling),
                    seed=config.seed,
                    run_id=run_id,
                    step=policy.version,
                    try_seconds=config.explorer.try_seconds if config.explorer else None,
                )
            )
            rows += store_rows(store, [_of_model(row, model) for row in made])
        scores = [row.reward for row in rows if row.reward is not None]
        if not scores:
            why = rows[-1].drop_reason or f"reward {rewards} gave nothing"
            raise JobError(f"none of {len(rows)} tries could be scored; the last: {why}")
        accuracy = sum(score >= 1 for score in scores) / len(scores)
        mean = sum(scores) / len(scores)
        unscored = len(rows) - len(scores)
        measured = {
            "eval/accuracy": accuracy,
            "eval/reward_mean": mean,
            "eval/unscored_rows": float(unscored),
        }
        if model is None:
            metrics = Metrics(mine)
            metrics.add(policy.version, measured)
            metrics.flush()
    if listener:
        listener("evaluate", policy.version, measured)
    made_by = policy.version if model is None else None
    return Evaluation(accuracy, mean, len(tasks), len(rows), unscored, made_by, run_id)


def _of_model(row: Experience, model: str | Path | None) -> Experience:
    """Say of a row which model wrote it, when that is none of the run's own."""
    if model is None:
        return row
    place = {"model": str(Path(model).absolute() if Path(model).exists() else model)}
    return replace(
        row, policy_version=None, segments=None, metadata={**(row.metadata or {}), **place}
    )


def _policy(
    store: Store, config: RunConfig, version: int | None, model: str | Path | None
) -> TransformersPolicy:
    if config.threads:
        torch.set_num_threads(config.threads)
    if model is not None:
        network, tokenizer = load_folder(model, dtype=config.model.dtype)
        return TransformersPolicy(put(network, config.model.device), tokenizer)
    folder = run_folder(store, config)
    found = published(store, folder, config.name)
    if version is None and not found:
        network, tokenizer = load(config.model, seed=config.seed)
        return TransformersPolicy(put(network, config.model.device), tokenizer)
    weights = newest(store, folder, config.name) if version is None else found.get(version)
    if weights is None or not weights.folder.is_dir():
        there = sorted(v for v, w in found.items() if w.folder.is_dir())
        raise ConfigError(
            f"run `{config.name}` has no weights of version {version}; there are {there}"
        )
    network, tokenizer = load_folder(weights.folder, dtype=config.model.dtype)
    return TransformersPolicy(put(network, config.model.device), tokenizer, version=weights.version)
