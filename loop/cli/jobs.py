"""Commands that run jobs: quickstart, run, explore, train, evaluate."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import DEFAULT_STORE, JOBS, JsonOption, StoreOption, app, open_store
from .printing import print_fields, print_json

if TYPE_CHECKING:
    from ...store import Store
    from ..config import RunConfig

ConfigArgument = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a packaged recipe.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override, as trainer.steps=100."),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on where the run stopped.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check and print the resolved configuration, and stop.")
]


@app.command(rich_help_panel=JOBS)
def quickstart(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Where to put everything; a new folder.", show_default="./quickstart"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all randomness.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Teach a tiny model to add, from nothing, in a minute or two; then query its history."""
    result = _heavy("quickstart").quickstart(folder, seed=seed, quiet=as_json)
    if as_json:
        print_json(result.summary())


@app.command(rich_help_panel=JOBS)
def run(
    config: ConfigArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run explorer and trainer together, or the trainer alone when the run is offline."""
    _work("run", config, store, overrides, resume=resume, dry_run=dry_run, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def explore(
    config: ConfigArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the experience of a run; its trainer is another process on the same store."""
    _work("explore", config, store, overrides, resume=resume, dry_run=dry_run, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def train(
    config: ConfigArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train on rows of the store: those of the run's explorer, or any that a query chooses."""
    _work("train", config, store, overrides, resume=resume, dry_run=dry_run, as_json=as_json)


@app.command(rich_help_panel=JOBS)
def evaluate(
    config: ConfigArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    version: Annotated[
        int | None, typer.Option(help="Policy version; the newest when left out.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model folder instead of the run's policy.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a policy on the tasks of `evaluate.where`; every try becomes a row."""
    settings, lake = _open(config, store, overrides)
    result = _heavy("evaluate").evaluate(lake, settings, version=version, model=model)
    _tell({**vars(result), "store": lake.uri}, as_json=as_json)


def _work(
    name: str,
    config: str,
    store: Any,
    overrides: list[str] | None,
    *,
    resume: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    jobs = _heavy("run")
    if dry_run:
        settings = _configured(config, overrides)
        jobs.check(settings)
        print(json.dumps(json.loads(settings.model_dump_json()), indent=2))
        return
    settings, lake = _open(config, store, overrides)
    from ..progress import Display

    work = getattr(jobs, name)
    with Display(settings, total_steps=settings.trainer.steps, quiet=as_json) as display:
        work(lake, settings, resume=resume, listener=display)
    warn_of_dropped(lake, settings.name)
    _tell(summary(lake, settings), as_json=as_json)


def summary(lake: "Store", settings: "RunConfig") -> dict[str, Any]:
    """Return what a run came to, as its store says."""
    [(steps, rows, reward)] = lake.sql(
        "SELECT count(*), sum(num_rows), arg_max(reward_mean, step) FROM steps "
        f"WHERE run_id = '{settings.name}'"
    ).fetchall()
    [(loss, version)] = lake.sql(
        "SELECT (SELECT arg_max(value, step) FROM metrics_current "
        f"WHERE run_id = '{settings.name}' AND name = 'train/loss'), "
        f"(SELECT max(policy_version) FROM policies_current WHERE run_id = '{settings.name}')"
    ).fetchall()
    return {
        "run": settings.name,
        "steps": steps,
        "rows_trained": int(rows or 0),
        "final_reward": reward,
        "final_loss": loss,
        **_unused(lake, settings.name),
        **_held_out(lake, settings.name),
        "policy_version": version,
        "store": lake.uri,
    }


def _unused(lake: "Store", run: str) -> dict[str, int]:
    """Return how many tries of the run were dropped, or never scored, when there are any."""
    [(dropped, unscored)] = lake.sql(
        "SELECT count(drop_reason), count(*) FILTER (drop_reason IS NULL AND reward IS NULL) "
        f"FROM experiences WHERE run_id = '{run}'"
    ).fetchall()
    counts = {"rows_dropped": dropped, "rows_unscored": unscored}
    return {name: count for name, count in counts.items() if count}


def warn_of_dropped(lake: "Store", run: str) -> None:
    """Say on stderr when most tries of the run taught nothing."""
    [(tries, dropped, reason)] = lake.sql(
        "SELECT count(*), count(drop_reason), mode(drop_reason) FROM experiences "
        f"WHERE run_id = '{run}'"
    ).fetchall()
    if 2 * dropped > tries:
        print(
            f"warning: {dropped} of {tries} tries were dropped, and nothing was learned from them; "
            f"the most frequent reason: {' '.join(reason.split())[:200]}",
            file=sys.stderr,
        )


def _held_out(lake: "Store", run: str) -> dict[str, float]:
    """Return the loss on held-out rows before and after, when the run measured it."""
    [(before, after)] = lake.sql(
        "SELECT arg_min(value, step), arg_max(value, step) FROM metrics_current "
        f"WHERE run_id = '{run}' AND name = 'eval/loss'"
    ).fetchall()
    return {} if before is None else {"held_out_loss_before": before, "held_out_loss_after": after}


def _configured(config: str, overrides: list[str] | None) -> "RunConfig":
    from ..config import load

    return load(config, overrides or [])


def _open(config: str, store: Any, overrides: list[str] | None) -> "tuple[RunConfig, Store]":
    """Read the configuration; open the store that the command names, or else the one in it."""
    settings = _configured(config, overrides)
    place = settings.store if store == DEFAULT_STORE and settings.store else store
    return settings, open_store(place, create=True)


def _heavy(module: str) -> Any:
    """Import a module that needs torch and transformers, or say how to install them."""
    from ...store.errors import missing_extra

    try:
        return import_module(f"...{module}", __name__)
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or module, "train") from error


def _tell(values: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(values)
    else:
        print_fields(values)
