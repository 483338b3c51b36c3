"""Multi-stage configurations: run the stages in order, each of them once."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from ..pipelines import Pipeline
from ..pipelines.report import check_read
from ..store import Store
from ..store.errors import ConfigError, RlakeError
from ..store.query import literal
from .config import RunConfig, Stage
from .evaluation.evaluate import evaluate
from .run import check, run
from .runs.job import came_to_nothing, same_config, stored_config
from .runs.metrics import Listener
from .weight_sync.run_models import with_recorded_versions


def run_stages(
    store: Store,
    stages: Sequence[Stage],
    *,
    resume: bool = False,
    only: str | None = None,
    listener: Listener | None = None,
) -> None:
    """Run stages in order, or `only` one; with `resume`, those that are not finished.

    The first stage that fails ends the run; its error names the stage.
    """
    for stage, is_finished in standing(store, stages, resume=resume, only=only):
        if not is_finished:
            run_stage(store, stage, resume=resume, listener=listener)


def standing(
    store: Store, stages: Sequence[Stage], *, resume: bool = False, only: str | None = None
) -> Iterator[tuple[Stage, bool]]:
    """Yield each stage, when its turn comes, with whether it is finished.

    All are checked before the first: the names in configurations, and that a started stage is
    resumed with the configuration that it had. Raises ConfigError.
    """
    check_stages(stages)
    chosen = [stage for stage in stages if only in (None, stage.name)]
    for stage in chosen:
        if not resume and stage.kind == "train" and _began(store, stage):
            raise ConfigError(
                f"stage `{stage.name}`: run `{stage.label}` was started before; continue it with "
                "`--resume`, or name new runs with `--set name=...`"
            )
    # all of them first: a stage that ran with another configuration must not be found hours later
    if resume:
        for stage in chosen:
            _finished(store, stages, stage)
    for stage in chosen:
        yield stage, resume and _finished(store, stages, stage)


def check_stages(stages: Sequence[Stage]) -> None:
    """Look up every name in all stages before any work; ConfigError names the stage."""
    for stage in stages:
        try:
            if stage.kind == "pipeline":
                pipeline_of(stage).plan()
            else:
                check(stage.config)
        except RlakeError as error:
            raise _of(stage, error) from error


def run_stage(
    store: Store, stage: Stage, *, resume: bool = False, listener: Listener | None = None
) -> None:
    """Run a stage; its errors name it."""
    try:
        if stage.kind == "train":
            run(store, stage.config, resume=resume, listener=listener)
        elif stage.kind == "evaluate":
            evaluate(store, stage.config, model=stage.model, title=stage.label, listener=listener)
        else:
            check_read(pipeline_of(stage).run(store), store)
    except RlakeError as error:
        raise _of(stage, error) from error


def pipeline_of(stage: Stage) -> Pipeline:
    """Return the pipeline of a stage, under the stage's name."""
    given = stage.pipeline
    if isinstance(given, str):
        return replace(Pipeline.from_yaml(Path(given)), name=stage.label)
    return Pipeline.from_yaml(yaml.safe_dump({**(given or {}), "name": stage.label}))


def _of(stage: Stage, error: RlakeError) -> RlakeError:
    return type(error)(f"stage `{stage.name}`: {error}")


def _began(store: Store, stage: Stage) -> bool:
    if stage.kind == "train" and came_to_nothing(store, stage.label):
        return False
    return bool(_jobs(store, stage)) or _piped(store, stage)


def _jobs(store: Store, stage: Stage) -> list[tuple[str, str, str]]:
    """Return (job, status, configuration) of the newest attempt of each job of a stage."""
    is_own = stage.kind == "train"
    column, jobs = ("run_id", "job <> 'evaluate'") if is_own else ("name", "job = 'evaluate'")
    return store.sql(
        f"SELECT job, status, config FROM job_events WHERE {column} = {literal(stage.label)} "
        f"AND {jobs} "
        "QUALIFY row_number() OVER (PARTITION BY job ORDER BY attempt DESC, created_at DESC) = 1 "
        "ORDER BY job DESC"
    ).fetchall()


def _piped(store: Store, stage: Stage) -> bool:
    ran = f"SELECT count(*) FROM lineage WHERE pipeline = {literal(stage.label)}"
    return stage.kind == "pipeline" and store.sql(ran).fetchall() != [(0,)]


def _finished(store: Store, stages: Sequence[Stage], stage: Stage) -> bool:
    """Return whether a stage is finished; ConfigError if it ran with another configuration."""
    try:
        return _is_done(store, stages, stage)
    except RlakeError as error:
        raise _of(stage, error) from error


def _is_done(store: Store, stages: Sequence[Stage], stage: Stage) -> bool:
    if stage.kind == "pipeline":
        return _piped(store, stage)
    jobs = {job: (status, config) for job, status, config in _jobs(store, stage)}
    due = {"evaluate"} if stage.kind == "evaluate" else {"train"}
    if stage.kind == "train" and stage.config.explorer is not None:
        due.add("explore")
    if any(jobs.get(job, ("", ""))[0] != "done" for job in due):
        return False
    # `train` comes last in the alphabet: the trainer's is the configuration to compare
    stored = jobs[max(due)][1]
    if stage.kind == "evaluate":
        return _same_evaluation(stage, stored)
    same_config(stored, with_recorded_versions(stage.config, stored))
    before = RunConfig.model_validate_json(stored).trainer.steps
    if before == stage.config.trainer.steps:
        return True
    later = stages[[s.name for s in stages].index(stage.name) + 1 :]
    begun = [other.name for other in later if _began(store, other)]
    if begun:
        raise ConfigError(
            f"it was finished with `trainer.steps` {before}, now it is "
            f"{stage.config.trainer.steps}, and `{begun[0]}` began with what it made; restore it, "
            "or name new runs with `--set name=...`"
        )
    return False


def _same_evaluation(stage: Stage, stored: str) -> bool:
    before = json.loads(stored)
    now = json.loads(stored_config(stage.config))
    for key in ("evaluate", "tasks", "seed"):
        if before.get(key) != now[key]:
            raise ConfigError(
                f"it was finished with another `{key}`; restore it, or name new runs with "
                "`--set name=...`"
            )
    return True
