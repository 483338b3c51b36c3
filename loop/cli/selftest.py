"""The command that verifies quickly that all of it learns: bench."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .app import JOBS, JsonOption, app
from .lazy import heavy
from .run import SetOption
from .tables import print_fields, print_json, print_rows


@app.command(rich_help_panel=JOBS)
def bench(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(help="arithmetic, countdown, frozen_lake, gsm8k, or all."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to put everything; a new folder.", show_default="./bench"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of reinforcement; else the recipe's.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all randomness.")] = 0,
    model: Annotated[
        Path | None, typer.Option(help="A model folder to start from, else a tiny model.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="What samples, as transformers or vllm.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="GSM8K's folder, else RLAKE_DATA or generated questions.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify quickly that models learn here: run recipes, and report before and after.

    Each task has a store of its own in the folder, beside the report: `report.html` and
    `reward.png`. The tiny model learns arithmetic, countdown and frozen_lake in minutes; of gsm8k
    it learns nothing, which only shows that all parts fit: name a `--model` for that.
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
    place = (folder or Path("bench")).absolute()
    made = work.run(tasks or ["arithmetic"], place, options)
    image, page = place / "reward.png", place / "report.html"
    work.picture(image, made)
    pages.write_page(page, made, options, image)
    if as_json:
        message = [one.summary() for one in made]
        print_json({"tasks": message, "report": str(page), "picture": str(image)})
        return
    for one in made:
        print(pages.notes(one), file=sys.stderr)
    print_rows(pages.HEADS, [pages.cells(one) for one in made])
    print_fields({"report": str(page), "picture": str(image)})
