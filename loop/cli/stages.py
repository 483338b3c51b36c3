"""`rlake run` of a multi-stage configuration."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...store import Store
from ..report.plan import plan
from ..report.summary import summary
from .app import heavy, opened
from .run_summary import print_trackers, warn_of_dropped, warn_of_untrained
from .tables import print_fields, print_heading, print_json

if TYPE_CHECKING:
    from ..config import Stage


def work_in_stages(
    stages: "Sequence[Stage]",
    store: Any,
    *,
    only: str | None,
    resume: bool,
    dry_run: bool,
    full: bool,
    as_json: bool,
) -> None:
    """Run stages in order, or `only` one."""
    from ..config.stages import of_name

    jobs = heavy("stages")
    chosen = [of_name(stages, only)] if only else list(stages)
    if dry_run:
        jobs.check_stages(chosen)
        for stage in chosen:
            heavy("cli.preflight").bind_conditions(stage.config)
        if full or as_json:
            print(json.dumps({stage.name: _plain(stage) for stage in chosen}, indent=2))
        else:
            print(*(_planned(stage) for stage in chosen), sep="\n", end="")
        return
    jobs.check_stages(stages)
    begins = {"train": "run", "evaluate": "evaluate", "pipeline": "serve"}[chosen[0].kind]
    lake = opened(chosen[0].config, store, begins)
    for stage, is_finished in jobs.standing(lake, stages, resume=resume, only=only):
        _say(stages, stage, is_finished=is_finished)
        if not is_finished:
            _run(lake, stage, resume=resume, quiet=as_json)
    message = {stage.name: stage_summary(lake, stage) for stage in chosen}
    if as_json:
        print_json({"name": stages[0].whole, "stages": message, "store": lake.uri})
        return
    for name, values in message.items():
        print_heading(name)
        print_fields(values)


def _run(lake: "Store", stage: "Stage", *, resume: bool, quiet: bool) -> None:
    from ..runs.progress import Display

    config = stage.config
    if stage.kind != "pipeline":
        print_trackers(lake, config)
    with Display(config, total_steps=config.trainer.steps, quiet=quiet) as display:
        heavy("stages").run_stage(lake, stage, resume=resume, listener=display)
    if stage.kind == "train":
        warn_of_dropped(lake, stage.label)
        warn_of_untrained(lake, stage.label)


def _say(stages: "Sequence[Stage]", stage: "Stage", *, is_finished: bool) -> None:
    place = [other.name for other in stages].index(stage.name) + 1
    what = {"train": f"run {stage.label}", "evaluate": f"evaluates run {stage.config.name}"}
    message = "finished before" if is_finished else what.get(stage.kind, f"pipeline {stage.label}")
    print(f"stage {place} of {len(stages)}, {stage.name}: {message}", file=sys.stderr, flush=True)


def _planned(stage: "Stage") -> str:
    what = stage.pipeline if stage.kind == "pipeline" else plan(stage.config, full=False)
    return f"# stage {stage.name}: {stage.kind}\n{what}"


def _plain(stage: "Stage") -> dict[str, Any]:
    if stage.kind == "pipeline":
        return {"does": stage.kind, "pipeline": stage.pipeline}
    model = {"model": stage.model} if stage.model else {}
    return {"does": stage.kind, **model, "config": stage.config.plain()}


def stage_summary(lake: "Store", stage: "Stage") -> dict[str, Any]:
    """Return a stage's results from the store."""
    if stage.kind == "train":
        return {k: v for k, v in summary(lake, stage.config.name).items() if k != "store"}
    if stage.kind == "pipeline":
        query = (
            "SELECT sum(rows_in)::BIGINT AS rows_in, sum(rows_out)::BIGINT AS rows_out "
            f"FROM lineage WHERE pipeline = '{stage.label}'"
        )
    else:
        [(attempt,)] = lake.sql(
            "SELECT max_by(attempt, created_at) FROM job_events "
            f"WHERE name = '{stage.label}' AND status = 'done'"
        ).fetchall()
        run_id = heavy("evaluation.history").rows_id(stage.config.name, attempt or 0)
        query = (
            "SELECT avg((reward >= 1)::INT) AS accuracy, avg(reward) AS reward_mean, "
            "count(*) AS num_rows, any_value(policy_version) AS policy_version, run_id "
            f"FROM experiences WHERE run_id = '{run_id}' GROUP BY run_id"
        )
    return next(iter(lake.sql(query).pl().to_dicts()), {})
