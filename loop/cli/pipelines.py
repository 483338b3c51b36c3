"""Commands that run pipelines: pipeline run, pipeline explain."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .app import PIPELINES, AtOption, JsonOption, StoreOption, app, open_store
from .printing import print_json, screen

commands = typer.Typer(help="Run a pipeline of operators, or say what it would do.")
app.add_typer(commands, name="pipeline", rich_help_panel=PIPELINES, no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(help="The pipeline's YAML file.")]


@commands.command()
def run(
    file: FileArgument,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a pipeline once: rows in, operators, rows out, one row of lineage.

    With `--at` it reads the store as it was; what it makes is appended to the store as it is.
    """
    from ...pipelines import Pipeline

    pipeline = Pipeline.from_yaml(file)
    with screen(stderr=True).status(f"running {file}"):
        report = pipeline.run(open_store(store), at=at)
    if as_json:
        print_json({k: v for k, v in asdict(report).items() if k != "rows"})
    else:
        print(report)


@commands.command()
def explain(file: FileArgument, store: StoreOption = None, at: AtOption = None) -> None:
    """Say what a pipeline would do, operator by operator; nothing is written."""
    from ...pipelines import Pipeline
    from ...store.errors import NotAStoreError

    pipeline = Pipeline.from_yaml(file)
    try:
        lake = open_store(store, at=at)
    except NotAStoreError:
        if at is not None:
            raise
        lake = None  # a plan needs no store; with one, its rows are looked at too
    print(pipeline.explain(lake))
