"""Commands that run jobs: quickstart, run, explore, train."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import JOBS, JsonOption, StoreOption, app
from .dry_run import plan
from .lazy import heavy, opened
from .run_summary import summary, tell, tell_monitors, warn_of_dropped, warn_of_untrained
from .tables import print_json

if TYPE_CHECKING:
    from ..config import RunConfig, Stage

ConfigArgument = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a packaged recipe.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override, as trainer.steps=100."),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on where the run stopped.")]
StageOption = Annotated[
    str | None,
    typer.Option("--stage", metavar="NAME", help="Of a configuration in stages, only this one."),
]
JoinOption = Annotated[
    int | None,
    typer.Option(
        "--join", metavar="N", min=1, help="Add N explorers to the run's that work on Ray, and end."
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check; print what is set and what follows; stop.")
]
FullOption = Annotated[
    bool, typer.Option("--full", help="With --dry-run: print all settings, defaults included.")
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
    result = heavy("selftest.quickstart").quickstart(folder, seed=seed, quiet=as_json)
    if as_json:
        print_json(result.summary())


def _command(name: str, told: str) -> Callable[..., None]:
    """Add the command of a job; all three take the same options."""

    def command(
        config: ConfigArgument,
        store: StoreOption = None,
        overrides: SetOption = None,
        stage: StageOption = None,
        resume: ResumeOption = False,
        dry_run: DryRunOption = False,
        full: FullOption = False,
        as_json: JsonOption = False,
    ) -> None:
        _work(
            name,
            config,
            store,
            overrides,
            stage=stage,
            resume=resume,
            dry_run=dry_run or full,
            full=full,
            as_json=as_json,
        )

    command.__doc__ = told
    return app.command(name, rich_help_panel=JOBS)(command)


run = _command(
    "run",
    """Run explorer and trainer together, or the trainer alone when the run is offline.

    A configuration in stages runs one after the other; `--resume` goes on in the middle.
    """,
)
explore = _command(
    "explore", "Make the experience of a run; its trainer is another process on the same store."
)
train = _command(
    "train",
    "Train on rows of the store: those of the run's explorer, or any that a query chooses.",
)


def _work(
    name: str,
    config: str,
    store: Any,
    overrides: list[str] | None,
    *,
    stage: str | None,
    resume: bool,
    dry_run: bool,
    full: bool,
    as_json: bool,
) -> None:
    if name != "explore" and not dry_run and heavy("trainer.distributed.launch").follows():
        stages = _stages(config, overrides) if stage is None else ()
        settings = stages[0].config if stages else configured(config, overrides, stage)
        heavy("trainer.distributed.follower").follow_torchrun(settings)
        return
    if name == "run" and (stages := _stages(config, overrides)):
        from .stages import work_in_stages

        work_in_stages(
            stages, store, only=stage, resume=resume, dry_run=dry_run, full=full, as_json=as_json
        )
        return
    jobs = heavy("run")
    if dry_run:
        settings = configured(config, overrides, stage)
        jobs.check(settings)
        print(plan(settings, full=full or as_json))
        return
    settings = configured(config, overrides, stage)
    jobs.check(settings)
    lake = opened(settings, store, name)
    from ..runs.progress import Display

    tell_monitors(lake, settings)
    work = getattr(jobs, name)
    with Display(settings, total_steps=settings.trainer.steps, quiet=as_json) as display:
        work(lake, settings, resume=resume, listener=display)
    warn_of_dropped(lake, settings.name)
    warn_of_untrained(lake, settings.name)
    tell(summary(lake, settings), as_json=as_json)


def _stages(config: str, overrides: list[str] | None) -> "tuple[Stage, ...]":
    from ..config import load_stages

    return load_stages(config, overrides or [])


def configured(config: str, overrides: list[str] | None, stage: str | None) -> "RunConfig":
    """Read the configuration of a job, of one stage where it is in stages."""
    from ...store.errors import ConfigError
    from ..config import load
    from ..config.stages import of_name

    if stage is None:
        return load(config, overrides or [])
    found = _stages(config, overrides)
    if not found:
        raise ConfigError(f"`{config}` does not run in stages; leave `--stage` out")
    return of_name(found, stage).config
