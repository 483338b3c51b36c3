"""Commands that prove what was trained on: verify."""

from typing import Annotated

import typer

from .app import PROOF, AtOption, JsonOption, StoreOption, app, open_store
from .tables import counted, print_json, screen


@app.command(rich_help_panel=PROOF)
def verify(
    run: Annotated[str, typer.Option(metavar="NAME", help="The run.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="The training step; else all.", show_default=False)
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove what a step was trained on: its rows are unchanged, and are drawn again the same.

    Reads the rows, compares their digests with those in `draws`, and draws the batch again from the
    seed, the step, and what was stored when it was drawn.
    """
    from ...store.verify_draws import steps_of
    from ...store.verify_draws import verify as check
    from ..trainer.redraw import rebuild

    lake = open_store(store, at=at)
    steps = [step] if step is not None else steps_of(lake, run)
    wrong, message = 0, []
    with screen(stderr=True).status("verifying") as status:
        for number in steps:
            status.update(f"verifying step {number} of {steps[-1]}")
            verdict, again = check(lake, run, number), rebuild(lake, run, number)
            wrong += not (verdict.holds and again.is_same)
            message.append({**vars(verdict), "holds": verdict.holds, "drawn_again": again.is_same})
            if not as_json and (step is not None or not (verdict.holds and again.is_same)):
                print(verdict, again, sep="\n")
    if as_json:
        print_json({"run": run, "steps": message, "holds": not wrong})
    elif step is None:
        print(f"{counted(len(steps), 'step')} of `{run}`: {wrong or 'none'} differ")
    if wrong:
        raise typer.Exit(1)
