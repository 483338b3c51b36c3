"""The command `debug`: what a workflow does with one task, seen in full."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import JOBS, JsonOption, StoreOption, app, open_store
from .lazy import heavy
from .run import SetOption
from .tables import print_fields, print_heading, print_json
from .token_colors import print_tokens, print_turns

if TYPE_CHECKING:
    from ...store import Task
    from ..config import RunConfig
    from ..evaluation.debug import Tried

debugger = typer.Typer(no_args_is_help=True, help="Look at what one part does, in full.")
app.add_typer(debugger, name="debug", rich_help_panel=JOBS)


@debugger.command()
def workflow(
    name: Annotated[str, typer.Argument(help="A workflow of ours, or `package.module:function`.")],
    task: Annotated[str | None, typer.Option(help="Id of a stored task, or its beginning.")] = None,
    ask: Annotated[str | None, typer.Option(help="A question, instead of a stored task.")] = None,
    answer: Annotated[str | None, typer.Option(help="What is right, with `--ask`.")] = None,
    config: Annotated[
        str, typer.Option(help="A YAML file or recipe: model, engine, rewards, sampling.")
    ] = "grpo_arithmetic",
    version: Annotated[int | None, typer.Option(help="Policy version of its run.")] = None,
    model: Annotated[str | None, typer.Option(help="A model folder instead.")] = None,
    tries: Annotated[int, typer.Option(min=1, help="Tries at the task, a group.")] = 1,
    store: StoreOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try one task with a live engine; show each turn, its tokens, the reward, and the row.

    Nothing is stored. Parameters are set by `--set explorer.workflow={NAME: {...}}`.
    """
    lake = open_store(store, create=task is None)
    found = _task(lake, task, ask, answer)
    settings = _configured(config, name, overrides)
    tried = heavy("evaluation.debug").try_once(
        lake, settings, found, version=version, model=model, tries=tries
    )
    if as_json:
        print_json({"policy": tried.label, "rows": [row.row() for row in tried.rows]})
    else:
        _print(tried)


def _task(lake: Any, name: str | None, ask: str | None, answer: str | None) -> "Task":
    from ...store import Task

    if (name is None) == (ask is None):
        raise typer.BadParameter("name a task with `--task ID`, or make one up with `--ask TEXT`")
    if ask is not None:
        return Task.ask(ask, answer)
    return heavy("evaluation.debug").find_task(lake, name)


def _configured(config: str, name: str, overrides: list[str] | None) -> "RunConfig":
    from ..config import load

    given = overrides or []
    if not any(change.startswith("explorer.workflow") for change in given):
        given = [*given, f"explorer.workflow={name}"]
    return load(config, given)


def _print(tried: "Tried") -> None:
    from ..evaluation.debug import pieces

    print_heading(f"task {tried.task.task_id}, tried by {tried.label}")
    print_fields({"prompt_text": tried.task.prompt_text, "answer": tried.task.answer}, indent=2)
    for i, row in enumerate(tried.rows):
        print_heading(f"row {i + 1} of {len(tried.rows)}")
        print_turns(row.messages or ())
        if row.token_ids is not None:
            print_tokens(vars(row), pieces(row.token_ids, tried.tokenizer))
        print_heading("rewards")
        print_fields({"reward": row.reward, **row.rewards}, indent=2)
        print_heading("the row that would be stored")
        hidden = ("messages", "rewards", "loss_mask")
        shown = {k: v for k, v in row.row().items() if v is not None and k not in hidden}
        print_fields(json.loads(json.dumps(shown, default=str)), indent=2)
