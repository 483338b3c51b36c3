"""The command `debug workflow`: run one task and print everything."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...store import Task
from .app import JOBS, JsonOption, StoreOption, app, argument, heavy, open_store, option
from .run import SetOption
from .show import print_tokens, print_turns
from .tables import print_fields, print_heading, print_json

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..evaluation.debug import DebugResult

debugger = typer.Typer(
    no_args_is_help=True, help="Run one part on its own, and print everything it does."
)
app.add_typer(debugger, name="debug", rich_help_panel=JOBS)


@debugger.command()
def workflow(
    name: Annotated[
        str, argument("Run this workflow: a built-in name or `package.module:function`.")
    ],
    task: Annotated[str | None, option("Use the stored task with this ID, or ID prefix.")] = None,
    ask: Annotated[str | None, option("Ask this question instead of a stored task.")] = None,
    answer: Annotated[str | None, option("Set the correct answer of `--ask`.")] = None,
    config: Annotated[
        str, option("Take model, engine, rewards and sampling from this YAML file or recipe.")
    ] = "grpo_arithmetic",
    version: Annotated[int | None, option("Use this policy version of the configured run.")] = None,
    model: Annotated[str | None, option("Use this model folder instead.")] = None,
    rollouts: Annotated[
        int, option("Make this many rollouts of the task, as one group.", min=1)
    ] = 1,
    store: StoreOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one task with a live engine; print each turn, the tokens, the reward and the row.

    Nothing is stored. Set parameters with `--set explorer.workflow={NAME: {...}}`.
    """
    lake = open_store(store, create=task is None)
    found = _task(lake, task, ask, answer)
    settings = _configured(config, name, overrides)
    result = heavy("evaluation.debug").run_task(
        lake, settings, found, version=version, model=model, rollouts=rollouts
    )
    if as_json:
        print_json({"policy": result.label, "rows": [row.row() for row in result.rows]})
    else:
        _print(result)


def _task(lake: Any, name: str | None, ask: str | None, answer: str | None) -> "Task":
    if (name is None) == (ask is None):
        raise typer.BadParameter(
            "name a task with `--task ID`, or ask a question with `--ask TEXT`"
        )
    if ask is not None:
        return Task.ask(ask, answer)
    return heavy("evaluation.debug").find_task(lake, name)


def _configured(config: str, name: str, overrides: list[str] | None) -> "RunConfig":
    from ..config import load

    given = overrides or []
    if not any(change.startswith("explorer.workflow") for change in given):
        # parameters given by `--set explorer.workflow={...}` must not be lost
        given = [*given, f"explorer.workflow={name}"]
    return load(config, given)


def _print(result: "DebugResult") -> None:
    from ..evaluation.debug import pieces

    print_heading(f"task {result.task.task_id}, policy {result.label}")
    print_fields({"prompt_text": result.task.prompt_text, "answer": result.task.answer}, indent=2)
    for i, row in enumerate(result.rows):
        print_heading(f"row {i + 1} of {len(result.rows)}")
        print_turns(row.messages or ())
        if row.token_ids is not None:
            print_tokens(vars(row), pieces(row.token_ids, result.tokenizer))
        print_heading("rewards")
        print_fields({"reward": row.reward, **row.rewards}, indent=2)
        print_heading("the row that would be stored")
        hidden = ("messages", "rewards", "loss_mask", "routed_experts")
        shown = {k: v for k, v in row.row().items() if v is not None and k not in hidden}
        print_fields(json.loads(json.dumps(shown, default=str)), indent=2)
