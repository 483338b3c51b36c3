"""Commands that run jobs: quickstart, selftest, run, explore, train."""

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store import interrupts
from ...store.errors import ConfigError
from ..report.plan import plan
from ..report.summary import summary
from .app import JOBS, JsonOption, SeedOption, StoreOption, app, argument, heavy, opened, option
from .run_summary import print_trackers, warn_of_dropped, warn_of_untrained
from .tables import counted, print_fields, print_json, print_rows, render

if TYPE_CHECKING:
    from ..config import RunConfig, Stage

ConfigArgument = Annotated[
    str, argument("Read this YAML file, or the packaged recipe of this name.")
]
SetOption = Annotated[
    list[str] | None,
    option(
        "Override a configuration key, as in trainer.steps=100; repeatable.",
        "--set",
        metavar="KEY=VALUE",
    ),
]
ResumeOption = Annotated[bool, option("Continue the run where it stopped.", "--resume")]
StageOption = Annotated[
    str | None, option("Run only this stage of a multi-stage configuration.", metavar="NAME")
]
AddExplorersOption = Annotated[
    int | None,
    option("Add N explorers to a running Ray job and exit.", metavar="N", min=1, default=False),
]
DryRunOption = Annotated[
    bool,
    option("Check the configuration, print it with what follows from it, and exit.", "--dry-run"),
]
FullOption = Annotated[
    bool, option("Like --dry-run, but print every setting with its default.", "--full")
]


@app.command(rich_help_panel=JOBS)
def quickstart(
    folder: Annotated[
        Path | None, argument("Put everything into this new folder.", default="./quickstart")
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Teach a tiny model to add, from nothing, in a minute or two; then query its history."""
    result = heavy("selftest.quickstart").quickstart(folder, seed=seed, quiet=as_json)
    if as_json:
        print_json(result.summary())


@app.command(rich_help_panel=JOBS)
def selftest(
    tasks: Annotated[
        list[str] | None,
        argument(
            "Run these tasks: alfworld, arithmetic, countdown, frozen_lake, gsm8k, guru_math, "
            "textworld, or all of which packages and data are there."
        ),
    ] = None,
    folder: Annotated[
        Path | None, option("Put everything into this new folder.", default="./selftest")
    ] = None,
    steps: Annotated[
        int | None, option("Train for this many RL steps.", min=1, default="the recipe's")
    ] = None,
    seed: SeedOption = 0,
    model: Annotated[
        Path | None, option("Start from this model folder.", default="a tiny new model")
    ] = None,
    engine: Annotated[
        str | None, option("Sample with this engine, such as transformers or vllm.", default=False)
    ] = None,
    data: Annotated[
        Path | None,
        option(
            "Read train.jsonl and test.jsonl of gsm8k or guru_math from this folder.",
            default="RLAKE_DATA for gsm8k, else generated questions",
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that models learn on this machine: run recipes and report before and after.

    Each task gets its own store in the folder, next to `report.html` and `reward.png`. The tiny
    model learns arithmetic, countdown, frozen_lake and, by imitation, textworld in minutes. It
    learns nothing from alfworld, gsm8k and guru_math, which only show that all parts work together;
    use `--model` to learn them. The games of alfworld are read from ALFWORLD_DATA.
    """
    work, pages = heavy("selftest.run"), heavy("selftest.report")
    options = work.Options(
        steps=steps,
        seed=seed,
        model=None if model is None else str(model),
        engine=engine,
        data=data,
        overrides=tuple(overrides or ()),
        quiet=as_json,
    )
    place = (folder or Path("selftest")).absolute()
    made = work.run(tasks or ["arithmetic"], place, options)
    image, page = place / "reward.png", place / "report.html"
    pages.plot_rewards(image, made)
    pages.write_page(page, made, options, image)
    if as_json:
        message = [one.summary() for one in made]
        print_json({"tasks": message, "report": str(page), "picture": str(image)})
        return
    for one in made:
        print(pages.notes(one), file=sys.stderr)
    print_rows(pages.HEADS, [pages.cells(one) for one in made])
    print_fields({"report": str(page), "picture": str(image)})


def _command(name: str, text: str) -> None:
    """Add the command of a job; all take the same options, but for `explore --add-explorers`."""

    def command(
        config: ConfigArgument,
        store: StoreOption = None,
        overrides: SetOption = None,
        stage: StageOption = None,
        resume: ResumeOption = False,
        add_explorers: AddExplorersOption = None,
        dry_run: DryRunOption = False,
        full: FullOption = False,
        as_json: JsonOption = False,
    ) -> None:
        dry_run = dry_run or full
        if add_explorers is not None:
            _add_explorers(configured(config, overrides, stage), add_explorers, as_json=as_json)
        elif (
            name != "explore"
            and not dry_run
            and heavy("trainer.distributed.launch").is_other_rank()
        ):
            stages = _stages(config, overrides) if stage is None else ()
            settings = stages[0].config if stages else configured(config, overrides, stage)
            heavy("trainer.distributed.ranks").run_torchrun_rank(settings)
        elif name == "run" and (stages := _stages(config, overrides)):
            from .stages import work_in_stages

            how = {"resume": resume, "dry_run": dry_run, "full": full, "as_json": as_json}
            work_in_stages(stages, store, only=stage, **how)
        else:
            settings = configured(config, overrides, stage)
            heavy("run").check(settings)
            if dry_run:
                heavy("cli.preflight").bind_conditions(settings)
                print(plan(settings, full=full or as_json))
            else:
                _work(name, settings, store, resume=resume, as_json=as_json)

    if name != "explore":  # typer reads the options from the signature
        whole = inspect.signature(command)
        own = [p for p in whole.parameters.values() if p.name != "add_explorers"]
        setattr(command, "__signature__", whole.replace(parameters=own))  # noqa: B010
    command.__doc__ = text
    app.command(name, rich_help_panel=JOBS)(command)


_command(
    "run",
    """Run explorer and trainer together, or the trainer alone when the run is offline.

    The stages of a multi-stage configuration run in order; `--resume` continues in the middle.
    """,
)
_command(
    "train", "Train on rows of the store: those of the run's explorer, or any that a query chooses."
)
_command(
    "explore", "Generate the experience of a run; its trainer is another process on the same store."
)


def _add_explorers(settings: "RunConfig", number: int, *, as_json: bool) -> None:
    total = heavy("explorer.ray.scale_up").join(settings, explorers=number)
    text = f"run `{settings.name}` has {counted(total, 'explorer')} now"
    render({"run": settings.name, "explorers": total}, text, as_json=as_json)


def _work(name: str, settings: "RunConfig", store: Any, *, resume: bool, as_json: bool) -> None:
    from ..runs.progress import Display

    lake = opened(settings, store, name)
    print_trackers(lake, settings)
    work = getattr(heavy("run"), name)
    try:
        with Display(settings, total_steps=settings.trainer.steps, quiet=as_json) as display:
            work(lake, settings, resume=resume, listener=display)
    except BaseException as error:
        if interrupts.caused(error):
            typer.echo(f"run `{settings.name}` stopped; `--resume` continues it", err=True)
        raise
    warn_of_dropped(lake, settings.name)
    warn_of_untrained(lake, settings.name)
    render(summary(lake, settings.name), as_json=as_json)


def _stages(config: str, overrides: list[str] | None) -> "tuple[Stage, ...]":
    from ..config import load_stages

    return load_stages(config, overrides or [])


def configured(config: str, overrides: list[str] | None, stage: str | None) -> "RunConfig":
    """Read the configuration of a job, or of one stage."""
    from ..config import load
    from ..config.stages import of_name

    if stage is None:
        return load(config, overrides or [])
    found = _stages(config, overrides)
    if not found:
        raise ConfigError(f"`{config}` has no stages; leave `--stage` out")
    return of_name(found, stage).config
